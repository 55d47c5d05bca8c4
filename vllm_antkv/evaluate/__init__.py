"""Measuring quality, offline in PyTorch and through vLLM."""
