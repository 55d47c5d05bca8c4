"""Which CUDA graphs vLLM may capture depends on the kernels that run."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_antkv.ops.dispatch import KERNELS
from vllm_antkv.vllm_adapter.step.backend import AntKVBackend, RecencyBackend

SPEC = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.uint8)


@pytest.mark.parametrize("backend", [AntKVBackend, RecencyBackend])
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("drafts", [False, True])
def test_decodes_are_captured_where_calls_only_launch_kernels(kernels, backend, drafts):
    config = VllmConfig()
    if drafts:
        config.speculative_config = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    layer = SimpleNamespace(impl=SimpleNamespace(attachment=SimpleNamespace(kernels=kernels)))
    config.compilation_config.static_forward_context["layer"] = layer
    on_gpus = {"triton", "cuda"}
    assert on_gpus <= {kernels.name for kernels in KERNELS}
    captured = AttentionCGSupport.UNIFORM_BATCH if drafts else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    expected = captured if kernels.name in on_gpus else AttentionCGSupport.NEVER
    assert backend.get_builder_cls().get_cudagraph_support(config, SPEC) == expected
