"""The operations on the cache, in reference form and as kernels."""
