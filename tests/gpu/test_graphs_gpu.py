"""A decode step captured in a CUDA graph computes the same for other requests when it is replayed."""

import pytest
import torch

from tests.gpu.on_device import DEVICE, OnDevice
from tests.kernels.engine import Engine, Shape, draw_sequence
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.dispatch import KERNELS
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan

SHAPE = Shape("antkv-1bit", 128, 8, 2, torch.bfloat16)
LENGTH = 280


def kernels(name):
    chosen = next(kernels for kernels in KERNELS if kernels.name == name)
    if (reason := chosen.missing(DEVICE, [])) is not None:
        pytest.skip(reason)
    return chosen


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_graph_replays_with_other_requests(name):
    """Captured once for the longest context, replayed on other tokens, other pages and padding."""
    build = kernels(name).build
    engine = Engine(AntKVConfig(), SHAPE, lambda layer: OnDevice(layer, build))
    sequences = [draw_sequence(seed, LENGTH, SHAPE) for seed in range(2)]
    for sequence in sequences:
        engine.step([(sequence, LENGTH)])
    engine.operations.upload()
    operations = engine.operations.operations
    steps = [last_token(sequence) for sequence in sequences]
    rows = last_rows(sequences[0])
    output = torch.empty_like(rows[0])
    captured = steps[0]

    is_sink = torch.zeros(len(rows[0]), dtype=torch.bool, device=DEVICE)

    def decode():
        operations.run(StepRows(*rows, is_sink), output, captured)

    # Compiles, tunes, and gives scratch memory its size.
    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for row, other in zip(rows, last_rows(sequences[1]), strict=True):
        row.copy_(other)
    captured.vq_block_table.copy_(steps[1].vq_block_table)
    captured.recency_block_table.copy_(steps[1].recency_block_table)
    output.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    expected = engine.offline(sequences[1])[LENGTH - 1]
    torch.testing.assert_close(output[0].cpu().double(), expected, rtol=4e-2, atol=4e-2)


def last_token(sequence):
    """A decode step of the sequence's last token, which its pages hold already, and a request of padding."""
    tables = []
    for blocks, width in ((sequence.vq_blocks, 4), (sequence.table, SHAPE.max_len)):
        table = torch.zeros(2, width, dtype=torch.int32)
        table[0, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        tables.append(table.to(DEVICE))
    return StepPlan(
        query_start_loc=torch.tensor([0, 1, 1], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([LENGTH, 0], dtype=torch.int32, device=DEVICE),
        vq_block_table=tables[0],
        recency_block_table=tables[1],
        max_query_len=1,
        max_seq_len=SHAPE.max_len,
    )


def last_rows(sequence):
    """Query, key and value of the last token, and a row of padding."""
    return [getattr(sequence, name)[[LENGTH - 1, LENGTH - 1]].to(DEVICE) for name in ("query", "key", "value")]
