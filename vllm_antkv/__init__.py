"""vllm-antkv: an ultra-low-bit, vector-quantised KV cache for vLLM with full precision where it matters.

Importing this package imports neither PyTorch nor vLLM; vLLM finds it through the entry points of `vllm_antkv.plugin`.
"""

__version__ = "0.2.0"
