"""A cycle model of one Hopper multiprocessor that executes the CUDA kernels' machine code: docs/sm-model.md."""
