"""What bounds a decode step follows from sizes; the figures by hand are of Llama-3-8B on an H100."""

import pytest
from transformers import LlamaConfig, PreTrainedModel

from vllm_antkv.evaluate.capacity import DecodeShape, largest_batch
from vllm_antkv.evaluate.gpus import GPUS
from vllm_antkv.evaluate.step_bound import PREDICTED_CYCLES, bounds, step_bound

LLAMA_3_8B = DecodeShape(
    num_layers=32, num_kv_heads=8, head_size=128, matrix_weights=7_504_658_432, weights=8_030_261_248
)
H100, H200 = GPUS["h100-80"], GPUS["h200-141"]


def test_weights_are_those_of_the_model(model: PreTrainedModel):
    shape = DecodeShape.of(model.config)
    assert shape.weights == sum(parameter.numel() for parameter in model.parameters())
    assert shape.matrix_weights <= shape.weights + model.lm_head.weight.numel()
    assert shape.num_kv_heads == model.config.num_key_value_heads


def test_llama_3_8b_has_the_weights_that_it_is_known_for():
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    assert DecodeShape.of(config) == LLAMA_3_8B


def test_by_hand():
    bound = step_bound(LLAMA_3_8B, H100, "auto", 1024, 400)
    assert bound.matrices == pytest.approx(2 * 7.504658e9 * 400 / 700e12, rel=1e-5)
    assert bound.attention == pytest.approx(400 * 1024 * 131072 / (0.88 * 3.35e12), rel=1e-5)
    coded = step_bound(LLAMA_3_8B, H100, "antkv-1bit", 32768, 8)
    assert coded.matrices == pytest.approx(2 * 7.504658e9 / 3.35e12, rel=1e-5), "few requests: the weights are read"
    assert bound.read_bytes == 2 * LLAMA_3_8B.matrix_weights + 400 * 1024 * 131072
    cycles = PREDICTED_CYCLES["antkv-1bit"]
    one_split, sixteen = 1024 * cycles.token + cycles.request, 32768 * cycles.token + cycles.request + 15 * cycles.split
    assert coded.attention == pytest.approx(8 * 256 * sixteen / (132 * 1.755e9), rel=1e-5)
    short = step_bound(LLAMA_3_8B, H100, "antkv-1bit", 1024, 3000)
    assert short.attention == pytest.approx(3000 * 256 * one_split / (132 * 1.755e9), rel=1e-5)


def test_the_batch_fits_and_one_more_does_not():
    batch = largest_batch(LLAMA_3_8B, H100, "auto", 4096)
    free = 0.92 * 80e9 - 2 * LLAMA_3_8B.weights - 2e9
    assert batch * 4096 * 131072 <= free < (batch + 1) * 4096 * 131072
    assert largest_batch(LLAMA_3_8B, H100, "antkv-1bit", 4096) > 10 * batch


def test_the_gain_grows_with_the_context_and_stays_below_what_the_matrices_allow():
    gains = []
    for context in (1024, 4096, 16384):
        auto, ours = bounds(LLAMA_3_8B, H100, ["auto", "antkv-1bit"], [context])
        gains.append(ours.tokens_per_second / auto.tokens_per_second)
        assert ours.tokens_per_second < ours.matrices_alone
    assert gains == sorted(gains)
    assert gains[0] < 3.5 < gains[2]


@pytest.mark.parametrize("cache", ["fp8", "antkv-4bit", "antkv-2bit", "antkv-0.75bit", "antkv-0.375bit"])
def test_every_cache_has_a_bound(cache):
    found = list(bounds(LLAMA_3_8B, H200, [cache], [1024, 8192]))
    assert [bound.context for bound in found] == [1024, 8192]


def test_a_model_that_does_not_fit_has_none():
    large = DecodeShape(80, 8, 128, 69_000_000_000, 70_000_000_000)
    assert list(bounds(large, H100, ["auto"], [1024])) == []
