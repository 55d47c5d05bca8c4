"""Triton kernels of the operations on the cache. They know nothing of vLLM."""
