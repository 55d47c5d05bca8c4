"""Every touch on vLLM's internals, one file each."""
