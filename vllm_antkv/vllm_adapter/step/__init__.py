"""The attention backend that vLLM calls in every step."""
