"""Learning codebooks and sinks from a model and a text."""
