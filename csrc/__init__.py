"""Sources of the CUDA and CPU kernels, compiled where they run; installed as vllm_antkv.csrc."""
