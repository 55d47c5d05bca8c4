"""The C++ kernels give what the offline evaluator computes in float64, however the steps are cut."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.anchor_bytes import assert_reads_every_byte, assert_stores_what_the_reference_stores
from tests.kernels.conftest import TESTED, operations_of
from tests.kernels.engine import Engine, Sequence, Shape, codebook, draw_sequence
from tests.kernels.missing_rows import assert_missing_rows_are_zeros
from tests.kernels.test_operations import CONFIGS, LENGTHS
from tests.processes import run_python
from vllm_antkv.codebook import Codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops import cpu
from vllm_antkv.ops.cpu import CpuOperations

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))


#: By dtype: the output is rounded to it, and a query or key in it may come nearer to another anchor.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}

SHAPES = [
    Shape(),
    Shape("antkv-4bit", 32, num_heads=2, num_kv_heads=2),
    Shape("antkv-2bit", 80, num_heads=3, num_kv_heads=1, rotary_dim=32, reorders=True),
    Shape("antkv-1bit", 64, num_heads=8, num_kv_heads=1, neox=False, magnitude=1.3, reorders=True),
    Shape("antkv-1bit", 96, num_heads=5, num_kv_heads=1, rotary_dim=0, reorders=True),
    Shape("antkv-1bit", 256, num_heads=6, num_kv_heads=2, magnitude=0.7, reorders=True),
    Shape("antkv-0.75bit", 48, num_heads=22, num_kv_heads=2),
    Shape("antkv-0.5bit", 80, num_heads=11, num_kv_heads=1, reorders=True, error=0.5),
    Shape("antkv-0.5bit", 64, num_heads=2, num_kv_heads=2),
    Shape("antkv-0.375bit", 96, num_heads=2, num_kv_heads=1),
    Shape("antkv-0.25bit", 64, num_heads=6, num_kv_heads=2, reorders=True, error=0.5),
    Shape(window=150),
    Shape("antkv-1bit", 64, num_heads=8, num_kv_heads=1, window=40, soft_cap=2.0, has_sinks=True),
    Shape("antkv-2bit", 80, num_heads=3, num_kv_heads=1, window=129, reorders=True, has_sinks=True, error=0.5),
    Shape("antkv-0.75bit", 48, num_heads=6, num_kv_heads=2, soft_cap=1.0, error=0.5),
    Shape("antkv-1bit", 64, num_heads=8, num_kv_heads=1, three_parts="blocks", reorders=True, magnitude=1.3, error=0.3),
    Shape("antkv-2bit", 80, num_heads=3, num_kv_heads=1, rotary_dim=32, three_parts="turns", neox=False, window=129),
]


@settings(max_examples=40)
@given(config=CONFIGS, shape=st.sampled_from(SHAPES), lengths=LENGTHS, data=st.data())
def test_any_schedule_gives_what_the_evaluator_computes(float32_kernels, config, shape, lengths, data):
    check_any_schedule(Engine(config, shape, float32_kernels), lengths, data)


def check_any_schedule(engine: Engine, lengths: list[int], data: st.DataObject) -> None:
    sequences = [draw_sequence(seed, length, engine.shape) for seed, length in enumerate(lengths)]
    engine.run(sequences, lambda left: data.draw(st.sampled_from([0, 1, 1, 2, 50, 127, 128, 200])))
    assert_offline(engine, sequences)


def assert_offline(engine: Engine, sequences: list[Sequence]) -> None:
    tolerance = TOLERANCES[engine.shape.dtype]
    for sequence in sequences:
        torch.testing.assert_close(sequence.output.double(), engine.offline(sequence), rtol=tolerance, atol=tolerance)


#: What tiles have code for, and what they leave to float32: channels that do not fill tiles.
BFLOAT16_SHAPES = [
    Shape("antkv-1bit", 128, 8, 2, torch.bfloat16, reorders=True, error=0.5),
    Shape("antkv-1bit", 128, 16, 1, torch.bfloat16, magnitude=0.7),
    Shape("antkv-1bit", 256, 4, 4, torch.bfloat16, magnitude=1.3, reorders=True),
    Shape("antkv-1bit", 80, 4, 2, torch.bfloat16, rotary_dim=32),
    Shape("antkv-1bit", 80, 44, 2, torch.bfloat16, rotary_dim=0, reorders=True, error=0.5),
    Shape("antkv-1bit", 96, 2, 2, torch.bfloat16, rotary_dim=48),
    Shape("antkv-2bit", 64, 3, 1, torch.bfloat16, rotary_dim=32, reorders=True, magnitude=1.3),
    Shape("antkv-4bit", 96, 20, 2, torch.bfloat16, neox=False, error=0.5),
    Shape("antkv-0.75bit", 128, 20, 2, torch.bfloat16, neox=False, rotary_dim=64, magnitude=1.3),
    Shape("antkv-0.75bit", 128, 4, 1, torch.bfloat16, reorders=True),
    Shape("antkv-0.5bit", 128, 6, 2, torch.bfloat16, reorders=True, error=0.5),
    Shape("antkv-0.5bit", 80, 20, 1, torch.bfloat16, rotary_dim=32),
    Shape("antkv-0.375bit", 64, 6, 2, torch.bfloat16, error=0.5),
    Shape("antkv-0.25bit", 128, 20, 2, torch.bfloat16, reorders=True),
    Shape("antkv-0.25bit", 96, 3, 1, torch.bfloat16, rotary_dim=64, error=0.5),
    Shape("antkv-1bit", 128, 8, 2, torch.bfloat16, reorders=True, window=150),
    Shape("antkv-1bit", 64, 16, 2, torch.bfloat16, window=60, has_sinks=True, error=0.5),
    Shape("antkv-2bit", 96, 10, 2, torch.bfloat16, soft_cap=2.0, has_sinks=True, error=0.5),
    Shape("antkv-0.75bit", 128, 4, 1, torch.bfloat16, window=129, soft_cap=1.0),
    Shape("antkv-1bit", 128, 8, 2, torch.bfloat16, reorders=True, three_parts="blocks"),
    Shape("antkv-1bit", 64, 16, 2, torch.bfloat16, three_parts="turns", magnitude=1.3, window=150, error=0.3),
    Shape("antkv-0.75bit", 96, 10, 2, torch.bfloat16, neox=False, rotary_dim=64, three_parts="turns"),
]


@pytest.mark.long
@settings(max_examples=10)
@given(config=CONFIGS, shape=st.sampled_from(BFLOAT16_SHAPES), lengths=LENGTHS, data=st.data())
def test_any_schedule_in_bfloat16(kernels, config, shape, lengths, data):
    check_any_schedule(Engine(config, shape, kernels), lengths, data)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [Shape("antkv-1bit", 128, 8, 2), Shape("antkv-0.375bit", 64, 4, 4)], ids=str)
def test_every_dtype(kernels, shape, dtype):
    check_steps(kernels, replace(shape, dtype=dtype))


@pytest.mark.parametrize("shape", BFLOAT16_SHAPES, ids=str)
def test_every_shape_in_bfloat16(kernels, shape):
    check_steps(kernels, shape)


def test_a_centroid_that_dwarfs_the_others(kernels, monkeypatch):
    """Whole numbers of 16 bits would hold it and nothing of the rest."""

    def with_a_giant(shape: Shape) -> Codebook:
        book = codebook(shape)
        book.k[0][:, :, 7] *= 1e4
        return book

    monkeypatch.setattr("tests.kernels.engine.codebook", with_a_giant)
    check_steps(kernels, BFLOAT16_SHAPES[0])


def check_steps(kernels, shape: Shape) -> None:
    engine = Engine(AntKVConfig(prefix=3), shape, kernels)
    sequences = [draw_sequence(seed, length, shape) for seed, length in enumerate((390, 129, 1))]
    # Single queries at the end: they have kernels of their own.
    engine.run(sequences, lambda left: 40 if left > 20 else 1)
    assert_offline(engine, sequences)


def test_the_kernels_run_on_pytorchs_threads():
    """Other packages bring OpenMP runtimes of their own, whose threads would fight with PyTorch's.

    In a process of its own, as vLLM's workers take `torch.set_num_threads` out of theirs.
    """
    script = """
import ctypes, torch
from vllm_antkv.ops import cpu
cpu.loaded(cpu.best())
for count in (1, 3):
    torch.set_num_threads(count)
    assert ctypes.CDLL(None).omp_get_max_threads() == count
"""
    run_python("-c", script)


@pytest.mark.parametrize("variant", TESTED, ids=lambda variant: variant.name)
def test_tiles_are_checked_before_they_serve(variant):
    operations_of(variant)
    right = [cpu.loaded(variant).antkv_tiles_multiply_right(tiles) for tiles in (variant.tiles, 0)]
    assert right == [bool(variant.tiles), 0]


def test_a_head_size_that_fills_no_vector_is_refused():
    with pytest.raises(UnsupportedModelError, match="kernels=reference"):
        Engine(AntKVConfig(), Shape("antkv-4bit", 8), partial(CpuOperations, variant=cpu.best()))


@pytest.mark.parametrize(
    ("preset", "num_heads", "window"),
    [
        ("antkv-4bit", 3, None),
        ("antkv-2bit", 4, None),
        ("antkv-1bit", 1, None),
        ("antkv-1bit", 12, None),
        ("antkv-1bit", 4, 700),
        ("antkv-0.75bit", 4, None),
    ],
)
def test_long_contexts(float32_kernels, preset, num_heads, window):
    """More coded tokens than centroids: values are added up by code. Tables of 4,096 are read ahead."""
    shape = Shape(preset, 16, num_heads=num_heads, num_kv_heads=1, max_len=1400, window=window)
    engine = Engine(AntKVConfig(anchor_share=0.05), shape, float32_kernels)
    sequence = draw_sequence(0, 1300, shape)
    engine.step([(sequence, 1297)])
    for _ in range(3):
        engine.step([(sequence, 1)])
    difference = (sequence.output.double() - engine.offline(sequence)).abs()
    # So many codes that some are ties, which float64 decides otherwise.
    assert difference.max() < 0.05
    assert (difference > 1e-3).double().mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_window_that_begins_in_another_split_than_it_ends(kernels, dtype):
    shape = Shape("antkv-1bit", 64, 4, 2, dtype, max_len=2400, window=300, soft_cap=3.0, has_sinks=True)
    engine, sequence = Engine(AntKVConfig(anchor_share=0.05), shape, kernels), draw_sequence(0, 2355, shape)
    engine.step([(sequence, 2030)])
    while sequence.computed < 2355:
        engine.step([(sequence, 1)])
    difference = (sequence.output.double() - engine.offline(sequence)).abs()
    # So many codes that some are ties, which float64 decides otherwise.
    assert difference.max() < (0.05 if dtype == torch.float32 else 0.1)
    assert difference.mean() < TOLERANCES[dtype] / 10


@pytest.mark.parametrize(
    "shape", [Shape(head_size=64, reorders=True), Shape(head_size=64, dtype=torch.bfloat16)], ids=str
)
def test_anchors_are_stored_as_the_reference_stores_them(kernels, shape):
    assert_stores_what_the_reference_stores(kernels, shape)


@pytest.mark.parametrize(
    "shape", [Shape(head_size=64, reorders=True), Shape("antkv-2bit", 128, magnitude=1.3)], ids=str
)
def test_every_byte_of_an_anchor_is_read(kernels, shape):
    assert_reads_every_byte(kernels, shape, 1e-4)


@pytest.mark.parametrize("recency", ["sliding:32", "none"])
@pytest.mark.parametrize("shape", [Shape(window=40), *BFLOAT16_SHAPES[:4]], ids=str)
def test_a_row_whose_page_is_null_is_zeros_and_marks_its_request(kernels, shape, recency):
    assert_missing_rows_are_zeros(kernels, shape, recency)
