"""The attention backend that vLLM calls."""
