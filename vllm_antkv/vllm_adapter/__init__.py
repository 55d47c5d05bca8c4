"""The only part of the package that touches vLLM: block pool, attention, server, hooks."""
