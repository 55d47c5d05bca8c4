"""What an engine is, decided when it is configured: refusals, the codebook, blocks, and the plan of all that."""
