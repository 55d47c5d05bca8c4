"""What changed between two releases of vLLM in the names that the package uses: from their sources, nothing is run."""
