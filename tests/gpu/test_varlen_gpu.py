"""Prompts through FlashAttention as vLLM ships it give what the reference does, also behind a past."""

from dataclasses import replace

import pytest
import torch

from tests.gpu.on_device import OnDevice
from tests.kernels.as_reference import assert_as_reference
from tests.kernels.engine import Shape
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops import varlen as varlen_operations

SHAPES = [
    Shape("antkv-1bit", 128, 16, 4, torch.bfloat16, max_len=1600),
    Shape("antkv-2bit", 64, 9, 3, torch.float16, max_len=1600, reorders=True),
    Shape("antkv-0.75bit", 128, 8, 1, torch.bfloat16, max_len=1600),
]
CUT = [[130, 1], [1, 128], [500, 2], [97, 200], [372, 69]]


def on_device(layer):
    from vllm_antkv.ops.triton import TritonOperations
    from vllm_antkv.vllm_adapter.step.flash_attention import flash_attention

    kernel = flash_attention(layer.recency.k.shape[-1], layer.recency.k.dtype, 2048)
    assert kernel is not None
    return OnDevice(replace(layer, varlen=kernel), TritonOperations)


@pytest.mark.parametrize("piece", [2, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts(monkeypatch, shape, piece):
    monkeypatch.setattr(varlen_operations, "PREFILL_CHUNK_BLOCKS", piece)
    assert_as_reference(AntKVConfig(), replace(shape, error=1.0), on_device, CUT)
