"""With ANTKV_CHECK the CUDA kernels name the line where they are handed something wrong; the emulation always does."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from scripts.compile_cuda import SOURCES
from tests.kernels.cuda_emulation.backend import needs_emulation, operations
from tests.kernels.engine import Engine, Shape, Workspace, draw_sequence
from tests.kernels.forked import forked
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan

pytestmark = needs_emulation
SHAPE = Shape("antkv-1bit", 64, 2, 1, torch.float16, reorders=True)
#: Pages that there are.
POOL = 1200


def said(action: Callable[[], object]) -> str:
    """What a process of its own writes to its standard error before it ends, or "done"."""
    with tempfile.TemporaryFile() as file:
        status = forked(action, file.fileno())
        file.seek(0)
        return file.read().decode() + ("done" if status == 0 else "")


def store(state: LayerState, spoil: Callable[[StepPlan], StepPlan] = lambda step: step) -> None:
    """The first 40 tokens of a request, in a step that something may be wrong with."""
    step = StepPlan(
        query_start_loc=torch.tensor([0, 40], dtype=torch.int32),
        seq_lens=torch.tensor([40], dtype=torch.int32),
        vq_block_table=torch.tensor([[1]], dtype=torch.int32),
        recency_block_table=torch.arange(1, 41, dtype=torch.int32)[None],
        max_query_len=40,
        max_seq_len=40,
    )
    sequence = draw_sequence(0, 40, SHAPE)
    operations()(state).encode_store(StepRows(sequence.query, sequence.key, sequence.value, None), spoil(step))


def state() -> LayerState:
    return replace(Engine(AntKVConfig(), SHAPE, ReferenceOperations).state, scratch=Workspace())


def first_angles(table: RotaryTable) -> RotaryTable:
    return replace(table, cos=table.cos[:9], sin=table.sin[:9])


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Once, for all processes."""
    store(state())


def with_ids(table: str, block_id: int) -> Callable[[StepPlan], StepPlan]:
    return lambda step: replace(step, **{table: torch.full_like(getattr(step, table), block_id)})


@pytest.mark.parametrize(
    ("spoil", "condition"),
    [
        (with_ids("vq_block_table", POOL), "id < layer.num_blocks"),
        (with_ids("vq_block_table", -1), "id >= 0"),
        (with_ids("recency_block_table", POOL), "id < layer.num_blocks"),
        (lambda step: replace(step, seq_lens=step.seq_lens - 1), "position >= 0"),
        (lambda step: replace(step, seq_lens=step.seq_lens + 100), "block < step.vq_table_stride"),
        (lambda step: replace(step, query_start_loc=step.query_start_loc + 1), "token"),
    ],
)
def test_a_wrong_step_is_named_with_its_line(spoil, condition):
    words = said(lambda: store(state(), spoil))
    named = re.search(r"(\w+\.cuh?):(\d+): (.*) does not hold", words)
    assert named is not None, words
    assert condition in named[3]
    assert "ANTKV_EXPECT" in (SOURCES / named[1]).read_text().splitlines()[int(named[2]) - 1]


@pytest.mark.parametrize(
    ("spoiled", "condition"),
    [
        (lambda layer: replace(layer, k_order=layer.k_order + 1), "channel < kHeadSize"),
        (lambda layer: replace(layer, rotary=first_angles(layer.rotary)), "rotary_rows"),
    ],
)
def test_a_wrong_layer_is_named_with_its_line(spoiled, condition):
    assert condition in said(lambda: store(spoiled(state())))


def test_what_is_right_passes():
    assert said(lambda: store(state())) == "done"
