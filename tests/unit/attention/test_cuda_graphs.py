"""Which CUDA graphs vLLM may capture depends on the kernels that run."""

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_antkv.attention.backend import AntKVBackend, RecencyBackend
from vllm_antkv.attention.worker import Worker, set_worker
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.dispatch import KERNELS, Kernels

SPEC = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.uint8)


@pytest.mark.parametrize("backend", [AntKVBackend, RecencyBackend])
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
def test_decodes_are_captured_where_calls_only_launch_kernels(kernels: Kernels, backend: type) -> None:
    config = VllmConfig()
    set_worker(config, Worker(kernels, Counters(torch.device("cpu"), kernels.name), "layer"))
    expected = {
        "cpu": AttentionCGSupport.NEVER,
        "reference": AttentionCGSupport.NEVER,
        "triton": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        "cuda": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    }
    assert backend.get_builder_cls().get_cudagraph_support(config, SPEC) == expected[kernels.name]
