"""What every set of kernels must do with the bytes of anchors; the reference, which has them from PyTorch, decides."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from tests.kernels.engine import Engine, Shape, draw_sequence
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.layer import LayerOperations, LayerState
from vllm_antkv.ops.paged import ReferenceOperations

EVERY_ROW = AntKVConfig(anchor_share=1.0, sinks=False, recency="none", prefix=0)
#: All e4m3 numbers: without the two that are none.
NUMBERS = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)

Operations = Callable[[LayerState], LayerOperations]


def assert_stores_what_the_reference_stores(operations: Operations, shape: Shape) -> None:
    """Errors from below the smallest e4m3 number to above the largest."""
    stored = []
    for build in (operations, ReferenceOperations):
        engine = Engine(EVERY_ROW, shape, build)
        sequence = draw_sequence(0, VQ_BLOCK_SIZE, shape)
        sequence.value = (sequence.value.float() * torch.logspace(0, 3, shape.head_size)).to(shape.dtype)
        engine.step([(sequence, VQ_BLOCK_SIZE)])
        vq, block = engine.state.vq, sequence.vq_blocks[0]
        order = vq.anchor_offsets[block].argsort(-1)[..., None].expand(-1, -1, -1, shape.head_size)
        sections = (rows[block, ..., : shape.head_size] for rows in (vq.k_anchors, vq.v_anchors))
        stored.append([rows.gather(1, order[:, kind]) for kind, rows in enumerate(sections)])
    (k, v), (expected_k, expected_v) = stored
    sizes = expected_v & 0x7F
    assert (sizes < 0x08).any(), "some are below 2^-6"
    assert (sizes == 0x7E).any(), "some saturate"
    assert torch.equal(v, expected_v)
    # Rows that were turned by angles in another order may be rounded to the neighbour.
    assert (k.int() - expected_k.int()).abs().max() <= 1
    assert (k != expected_k).float().mean() < 1e-3


def assert_reads_every_byte(build: Operations, shape: Shape, tolerance: float) -> None:
    """A channel has the same V byte in all rows of a closed block, so that the output shows how it was read."""
    engine = Engine(EVERY_ROW, shape, build)
    vq, operations = engine.state.vq, engine.operations

    def run_and_attend(rows, output, step):
        operations.run(rows, output, step)
        expected = torch.empty_like(output)
        ReferenceOperations(engine.state).attend(rows, expected, step)
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)

    sequence = draw_sequence(0, 200, shape)
    engine.step([(sequence, VQ_BLOCK_SIZE)])
    block = sequence.vq_blocks[0]
    engine.operations = SimpleNamespace(run=run_and_attend)
    # K's would swamp all other logits if they were large.
    small = NUMBERS[NUMBERS.view(torch.float8_e4m3fn).float().abs() <= 0.25]
    num_channels = shape.num_kv_heads * shape.head_size
    for turn, first in enumerate(range(0, len(NUMBERS), num_channels)):
        bytes_of_v = NUMBERS[torch.arange(first, first + num_channels) % len(NUMBERS)]
        vq.v_anchors[block, ..., : shape.head_size] = bytes_of_v.view(shape.num_kv_heads, 1, shape.head_size)
        generator = torch.Generator().manual_seed(turn)
        vq.k_anchors[block] = small[torch.randint(len(small), vq.k_anchors[block].shape, generator=generator)]
        engine.step([(sequence, 1 + turn % 2)])
