"""The Triton kernels on a GPU give what the offline evaluator computes in float64, and pages equal to the reference's.

The properties are those of tests/kernels/test_triton_interpreted.py, on tiles of the sizes that GPUs run.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.on_device import OnDevice
from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.missing_rows import assert_missing_rows_are_zeros
from tests.kernels.test_operations import LENGTHS
from tests.kernels.triton_cases import (
    CONFIGS,
    DRAWN_CONFIGS,
    SHAPES,
    assert_offline,
    assert_pages_are_those_of_the_reference,
    serve,
    serve_drafts,
)
from vllm_antkv.config import AntKVConfig

#: What the interpreter takes too long for.
LARGE = [
    Shape("antkv-1bit", 128, 16, 4, torch.bfloat16),
    Shape("antkv-2bit", 128, 8, 2, torch.float16),
    Shape("antkv-1bit", 256, 2, 1, torch.bfloat16),
    Shape("antkv-0.75bit", 128, 4, 2, torch.bfloat16),
    Shape("antkv-0.5bit", 128, 4, 1, torch.float16),
    Shape("antkv-0.375bit", 128, 4, 1, torch.float16),
    Shape("antkv-0.25bit", 128, 4, 1, torch.float16),
]
FEW_SHAPES = [Shape(num_heads=2), Shape("antkv-1bit", 64, 4, 2, torch.float16)]


def on_device(layer):
    from vllm_antkv.ops.triton import TritonOperations

    return OnDevice(layer, TritonOperations)


@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)
def test_layers(shape):
    engine = Engine(AntKVConfig(recency="sliding:8", prefix=2), shape, on_device)
    assert_offline(engine, serve(engine))


@pytest.mark.parametrize("recency", ["sliding:32", "none"])
def test_a_row_whose_page_is_null_is_zeros_and_marks_its_request(recency):
    assert_missing_rows_are_zeros(on_device, FEW_SHAPES[1], recency)


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_a_long_past(shape):
    """Decoding over splits, and over anchors of several chunks of blocks in each."""
    engine = Engine(AntKVConfig(), replace(shape, max_len=3000), on_device)
    assert_offline(engine, serve(engine, [(2700, 1400), (1, 1), (1, 1)]))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.anchor_share} {config.recency}")
def test_settings(config):
    engine = Engine(config, FEW_SHAPES[1], on_device)
    assert_offline(engine, serve(engine, [(130, 5), (1, 1), (1, 128)]))


@settings(max_examples=25)
@given(config=DRAWN_CONFIGS, shape=st.sampled_from(FEW_SHAPES), lengths=LENGTHS, data=st.data())
def test_any_schedule(config, shape, lengths, data):
    engine = Engine(config, shape, on_device)
    sequences = [draw_sequence(seed, length, shape) for seed, length in enumerate(lengths)]
    engine.run(sequences, lambda left: data.draw(st.sampled_from([0, 1, 2, 50, 127, 128, 200])))
    assert_offline(engine, sequences)


@pytest.mark.parametrize("shape", [*FEW_SHAPES, LARGE[0], SHAPES[12]], ids=str)
def test_drafts(shape):
    engine = Engine(AntKVConfig(), shape, on_device, num_drafts=3)
    assert_offline(engine, serve_drafts(engine))


@pytest.mark.parametrize(("preset", "num_drafts"), [("antkv-1bit", 0), ("antkv-1bit", 3), ("antkv-0.75bit", 0)])
def test_pages_are_those_of_the_reference(preset, num_drafts):
    assert_pages_are_those_of_the_reference(on_device, Shape(preset, 48, 2, 1), num_drafts)
