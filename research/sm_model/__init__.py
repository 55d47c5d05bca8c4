"""A cycle model of one Hopper multiprocessor that executes the CUDA kernels' machine code; see README.md."""
