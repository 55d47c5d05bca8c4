"""Example settings, and tables that the package reads: tested families of models, and what its hooks expect of vLLM."""
