"""Sources of the CUDA and CPU kernels, compiled where they run."""
