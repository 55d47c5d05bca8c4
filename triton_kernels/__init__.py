"""Triton kernels of the operations on the cache, installed as vllm_antkv.triton_kernels. They know nothing of vLLM."""
