"""`prefill_reads_cache: false`: queries of a prompt see exactly what the first one of their step does."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.as_reference import assert_as_reference
from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.test_cpu import SHAPES
from tests.kernels.test_operations import CONFIGS
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.select.recency import ALWAYS

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=3)
CHUNKS = st.sampled_from([200, 128, 127, 50, 2, 1, 0])


def draw_schedule(lengths: list[int], data: st.DataObject) -> list[list[int]]:
    """Steps that compute all tokens, none without any."""
    left, schedule = list(lengths), []
    while any(left):
        counts = [min(data.draw(CHUNKS), each) for each in left]
        if any(counts):
            schedule.append(counts)
            left = [each - count for each, count in zip(left, counts, strict=True)]
    return schedule


@settings(max_examples=40)
@given(config=CONFIGS, shape=st.sampled_from(SHAPES), lengths=LENGTHS, data=st.data())
def test_any_schedule_in_float32(float32_kernels, config, shape, lengths, data):
    assert_as_reference(config, shape, float32_kernels, draw_schedule(lengths, data))


@pytest.mark.parametrize("recency", ["sliding:32", "sliding:150", "log:8", "none"])
@pytest.mark.parametrize("window", [None, 150])
def test_tiles(kernels, recency, window):
    """A chunk within a block, one over several, and one that begins where a block does."""
    shape = Shape("antkv-1bit", 128, 8, 2, torch.bfloat16, max_len=900, error=0.5, window=window)
    assert_as_reference(AntKVConfig(recency=recency), shape, kernels, [[130, 5], [60, 200], [194, 51], [300, 1]])


@pytest.mark.parametrize("recency", ["sliding:32", "log:8", "none"])
def test_the_reference_sees_what_the_first_query_of_a_step_does(recency):
    """As where the table lets every query see what it lets the first one."""
    config, shape = AntKVConfig(recency=recency, prefill_reads_cache=False), Shape(max_len=700)
    engine, sequence = Engine(config, shape, ReferenceOperations, torch.float64), draw_sequence(0, 600, shape)
    expected, same = Engine(config, shape, ReferenceOperations, torch.float64), draw_sequence(0, 600, shape)
    start = 0
    for count in (300, 1, 150, 149):
        engine.step([(sequence, count)])
        seen = expected.state.last_query
        state = replace(
            expected.state,
            last_query=torch.where(seen >= start, ALWAYS, seen),
            config=config.model_copy(update={"prefill_reads_cache": True}),
        )
        expected.operations = ReferenceOperations(state)
        expected.step([(same, count)])
        start += count
    torch.testing.assert_close(sequence.output, same.output)
