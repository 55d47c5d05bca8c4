"""Computed capacity follows from bytes, and what bounds a decode step from sizes; by hand of Llama-3-8B."""

import math

import pytest

from vllm_antkv.capacity.gpus import GPUS
from vllm_antkv.capacity.memory import (
    GPU_SHARE,
    WORKSPACE_BYTES,
    DecodeShape,
    codebooks_of,
    largest_batch,
    pool_bytes,
    sequence_bytes,
)
from vllm_antkv.capacity.step_bound import DECODE_CYCLES, step_bound
from vllm_antkv.config import AntKVConfig
from vllm_antkv.presets import PRESETS

LLAMA_3_8B = DecodeShape(32, 8, 128, matrix_weights=7_504_658_432, weights=8_030_261_248, group=4)
SMALL = GPUS["l4-24"]


def test_the_shape_is_that_of_the_model(model):
    shape = DecodeShape.of(model.config)
    assert 2 * shape.weights == sum(2 * p.numel() for p in model.parameters())
    assert shape.matrix_weights <= shape.weights + model.lm_head.weight.numel()
    assert (shape.num_layers, shape.num_kv_heads) == (model.config.num_hidden_layers, model.config.num_key_value_heads)


@pytest.mark.parametrize("cache", LLAMA_3_8B.caches)
def test_the_pool_is_what_is_left(cache):
    taken = 2 * LLAMA_3_8B.weights + codebooks_of(LLAMA_3_8B, cache)
    assert pool_bytes(LLAMA_3_8B, SMALL, cache) == GPU_SHARE * 24e9 - taken - WORKSPACE_BYTES


def test_centroids_of_an_8b_model_are_34_megabytes():
    sizes = [round(codebooks_of(LLAMA_3_8B, cache) / 1e6) for cache in LLAMA_3_8B.caches]
    assert sizes == [0, 0, *6 * [34]]


@pytest.mark.parametrize("cache", LLAMA_3_8B.caches)
def test_the_batch_fits_and_one_more_does_not(cache):
    sequence = LLAMA_3_8B.heads * sequence_bytes(LLAMA_3_8B, cache, 8192)
    batch = largest_batch(LLAMA_3_8B, SMALL, cache, 8192)
    assert batch * sequence <= pool_bytes(LLAMA_3_8B, SMALL, cache) < (batch + 1) * sequence


def test_fewer_bits_hold_more_and_the_settings_count():
    batches = [largest_batch(LLAMA_3_8B, GPUS["h200-141"], cache, 8192) for cache in LLAMA_3_8B.caches]
    assert batches == sorted(batches)
    assert len(set(batches)) == len(batches)
    more = AntKVConfig(recency="sliding:512")
    assert sequence_bytes(LLAMA_3_8B, "antkv-1bit", 8192, more) > sequence_bytes(LLAMA_3_8B, "antkv-1bit", 8192)
    assert sequence_bytes(LLAMA_3_8B, "fp8", 8192, more) == sequence_bytes(LLAMA_3_8B, "auto", 8192) / 2


def test_presets_that_do_not_divide_the_heads_are_left_out():
    assert DecodeShape(1, 1, 16, 1, 1).caches == ["auto", "fp8", *list(PRESETS)[:5]]


@pytest.mark.parametrize("name", GPUS)
def test_a_gpus_figures_agree_with_each_other(name):
    """A multiprocessor does a power of two of 16-bit operations in a cycle: a typo in peak, count or clock shows."""
    gpu = GPUS[name]
    per_cycle = gpu.dense_flops / (gpu.multiprocessors * gpu.clock)
    assert per_cycle == pytest.approx(2 ** round(math.log2(per_cycle)), rel=0.05)
    assert 0.7 <= round(gpu.flops / gpu.dense_flops, 2) <= 0.77
    assert name.endswith(f"-{gpu.memory / 1e9:.0f}")


def test_a_step_is_bounded_as_by_hand():
    h100 = GPUS["h100-80"]
    bound = step_bound(LLAMA_3_8B, h100, "auto", 1024, 400)
    assert bound.matrices == pytest.approx(2 * 7.504658e9 * 400 / 700e12, rel=1e-5)
    assert bound.attention == pytest.approx(400 * 1024 * 131072 / (0.88 * 3.35e12), rel=1e-5)
    coded = step_bound(LLAMA_3_8B, h100, "antkv-1bit", 32768, 8)
    assert coded.matrices == pytest.approx(2 * 7.504658e9 / 3.35e12, rel=1e-5), "few requests: the weights are read"
    assert bound.read_bytes == 2 * LLAMA_3_8B.matrix_weights + 400 * 1024 * 131072
    cycles = DECODE_CYCLES["antkv-1bit"]
    one_split, sixteen = 1024 * cycles.token + cycles.request, 32768 * cycles.token + cycles.request + 15 * cycles.split
    assert coded.attention == pytest.approx(8 * 256 * sixteen / (132 * h100.clock), rel=1e-5)
    short = step_bound(LLAMA_3_8B, h100, "antkv-1bit", 1024, 3000)
    assert short.attention == pytest.approx(3000 * 256 * one_split / (132 * h100.clock), rel=1e-5)
