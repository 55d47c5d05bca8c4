"""The reference operations give what the offline evaluator computes on whole windows, however the steps are cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.missing_rows import assert_missing_rows_are_zeros
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.paged import ReferenceOperations

SMALL = Shape()
SHAPES = [
    SMALL,
    Shape("antkv-4bit", 8),
    Shape("antkv-0.75bit", 32, rotary_dim=16, reorders=True),
    Shape("antkv-0.5bit", 32, reorders=True, error=0.5),
    Shape("antkv-0.375bit", 32, neox=False, reorders=True),
    Shape("antkv-0.25bit", 64, reorders=True),
    Shape(window=150),
    Shape(window=40, soft_cap=2.0),
    Shape(window=20, has_sinks=True),
    Shape("antkv-4bit", 8, soft_cap=1.0, has_sinks=True),
    Shape(error=0.5),
    Shape("antkv-0.75bit", 32, rotary_dim=16, reorders=True, magnitude=1.3, error=0.2),
    Shape(window=40, soft_cap=2.0, has_sinks=True, neox=False, error=0.5),
    Shape(three_parts="blocks", reorders=True, error=0.5),
    Shape(three_parts="blocks", reorders=True),
    Shape("antkv-0.75bit", 32, rotary_dim=24, three_parts="turns", neox=False, window=150),
]

#: Of sequences.
LENGTHS = st.lists(st.integers(1, 330), min_size=1, max_size=3)
CONFIGS = st.builds(
    AntKVConfig,
    anchor_share=st.sampled_from([0.0, 0.01, 0.05, 1.0]),
    anchor_dtype=st.sampled_from(["fp8", "model"]),
    sinks=st.booleans(),
    prefix=st.sampled_from([0, 1, 8, 150]),
    recency=st.sampled_from(["none", "sliding:1", "sliding:32", "sliding:200", "log:4", "log:42"]),
    windows=st.sampled_from(["coded", "exact"]),
)


@settings(max_examples=40)
@given(config=CONFIGS, shape=st.sampled_from(SHAPES), lengths=LENGTHS, data=st.data())
def test_any_schedule_gives_what_the_evaluator_computes(config, shape, lengths, data):
    engine = Engine(config, shape, ReferenceOperations, torch.float64)
    sequences = [draw_sequence(seed, length, shape) for seed, length in enumerate(lengths)]
    engine.run(sequences, lambda left: data.draw(st.sampled_from([0, 1, 2, 50, 127, 128, 200])))
    for sequence in sequences:
        torch.testing.assert_close(sequence.output.double(), engine.offline(sequence), rtol=1e-3, atol=1e-4)
    assert len(engine.free) == 1199


@pytest.mark.parametrize("recency", ["sliding:32", "none"])
@pytest.mark.parametrize("shape", [SMALL, Shape(window=40), Shape(dtype=torch.bfloat16, error=0.5)], ids=str)
def test_a_row_whose_page_is_null_is_zeros_and_marks_its_request(shape, recency):
    assert_missing_rows_are_zeros(ReferenceOperations, shape, recency)
