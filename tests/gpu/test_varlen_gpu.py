"""Prompts through FlashAttention as vLLM ships it give what the offline evaluator computes, bit by bit however cut."""

from dataclasses import replace

import pytest
import torch

from tests.gpu.on_device import OnDevice
from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.triton_cases import assert_offline, serve
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops import varlen as varlen_operations

pytestmark = pytest.mark.gpu

SHAPES = [
    Shape("antkv-1bit", 128, 16, 4, torch.bfloat16, max_len=1600),
    Shape("antkv-2bit", 64, 9, 3, torch.float16, max_len=1600, reorders=True),
    Shape("antkv-0.75bit", 128, 8, 1, torch.bfloat16, max_len=1600),
]
CUT = [(130, 1), (1, 128), (500, 2), (97, 200), (372, 69)]


def on_device(layer):
    from vllm_antkv.ops.triton import TritonOperations
    from vllm_antkv.vllm_adapter.attention.flash_attention import flash_attention

    kernel = flash_attention(layer.recency.k.shape[-1], layer.recency.k.dtype, 2048)
    assert kernel is not None
    return OnDevice(replace(layer, varlen=kernel), TritonOperations)


@pytest.mark.parametrize("piece", [2, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts(monkeypatch, shape, piece):
    monkeypatch.setattr(varlen_operations, "PREFILL_CHUNK_BLOCKS", piece)
    engine = Engine(AntKVConfig(), shape, on_device)
    assert_offline(engine, serve(engine, CUT))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_cut_changes_bits_only_of_a_window(shape):
    """Of tokens that were computed with others; single tokens are those of decoding.

    FlashAttention 3 rounds otherwise where a window's queries lie elsewhere in a tile (seen on an H200): those of the
    first tokens of a block, when one of them begins a step.
    """
    outputs = []
    for chunks in ([1100], [130, 500, 98, 372]):
        engine = Engine(AntKVConfig(), shape, on_device)
        sequence = draw_sequence(0, 1100, shape)
        for chunk in chunks:
            engine.step([(sequence, chunk)])
        outputs.append(sequence.output)
    window = slice(130, VQ_BLOCK_SIZE + AntKVConfig().recency_policy.window)
    rounding = torch.finfo(shape.dtype).eps
    torch.testing.assert_close(*(output[window] for output in outputs), rtol=2 * rounding, atol=rounding)
    for part in (slice(None, window.start), slice(window.stop, None)):
        assert torch.equal(*(output[part] for output in outputs))
