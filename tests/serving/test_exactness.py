"""What is served does not depend on how vLLM schedules it, and equals `auto` where everything is exact.

Float32, so that rounding in batched matrix products stays far below the tolerance.
"""

from dataclasses import replace

import pytest
import torch

from tests.places import EMBEDDED, PRESET
from tests.serving.conftest import (
    Start,
    assert_aborts_leave_every_block_free,
    assert_all_same,
    assert_preemption_is_not_seen,
    assert_scheduling_is_not_seen,
)
from vllm_antkv.ops import dispatch
from vllm_antkv.ops.layer import LayerOperations, LayerState
from vllm_antkv.ops.warm_up import warm_up

#: Settings whose results must not depend on scheduling, as the default ones below. prefill_reads_cache false may.
ORDINARY = [
    pytest.param({"recency": "log:8"}, id="log recency"),
    pytest.param({"recency": "none", "prefix": 1}, id="no recency", marks=pytest.mark.long),
    pytest.param(
        {"anchor_share": 0.1, "anchor_dtype": "model", "recency": "sliding:100", "prefix": 20},
        id="many anchors",
        marks=pytest.mark.long,
    ),
    pytest.param({"anchor_share": 0.0, "sinks": False, "recency": "none", "prefix": 0}, id="codes alone"),
]


@pytest.fixture
def start(start_engine, default) -> Start:
    """An engine of the embedded model, with changes to the default settings."""
    return lambda settings={}, **options: start_engine(EMBEDDED, PRESET, default | settings, **options)


@pytest.mark.parametrize(
    "settings",
    [
        {"recency": "sliding:1024"},
        {"recency": "log:1024"},
        {"prefix": 1024},
        {"anchor_share": 1.0, "anchor_dtype": "model"},
    ],
    ids=str,
)
def test_equals_auto_where_every_token_is_exact(start, auto, prompts, settings):
    with start(settings, max_num_batched_tokens=300) as engine:
        assert_all_same(engine.complete(prompts), auto)


def test_a_prompt_of_one_step_attends_as_with_auto(start, auto, prompts):
    """By default: codes are read by what follows."""
    with start({"prefill_reads_cache": False}, max_num_batched_tokens=1024) as engine:
        first = engine.complete(prompts, max_tokens=1, together=False)
    assert_all_same(first, [replace(each, tokens=each.tokens[:1], top_logprobs=each.top_logprobs[:1]) for each in auto])


def test_codes_alone_differ_from_auto(alone, auto):
    """The comparisons of this file can fail: a quantised past changes the log-probabilities."""
    with pytest.raises(AssertionError):
        assert_all_same(alone, auto)


@pytest.mark.parametrize("settings", ORDINARY)
def test_same_however_a_prompt_is_chunked_batched_or_cached(start, prompts, settings):
    with start(settings, max_num_batched_tokens=1024, prefix_cache_retention_interval=256) as engine:
        assert_scheduling_is_not_seen(engine, prompts, chunks=[200])


def assert_same_bits(ours, expected):
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.top_logprobs == theirs.top_logprobs


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_is_the_same_however_prompts_are_cut(start_engine, codebooks, prompts, dtype):
    if dtype == "bfloat16":
        if torch.cpu._is_amx_tile_supported():
            pytest.skip("with AMX oneDNN's products of bfloat16 round by how many rows there are, with auto too")
        # Many processors multiply it slowly. These surround the edges of blocks.
        prompts = prompts[1::2]
    options = {"dtype": dtype, "max_num_batched_tokens": 1024}
    with start_engine(EMBEDDED, PRESET, {"codebooks": codebooks}, **options) as engine:
        alone = engine.complete(prompts, together=False)
        for chunk in (1024, 67, 256):
            engine.start_anew(chunk)
            assert_same_bits(engine.complete(prompts), alone)
            cached = engine.complete(prompts)
            assert_same_bits(cached, alone)
            assert any(completion.num_cached_tokens for completion in cached)


def test_same_after_preemption(start, prompts):
    options = {"max_model_len": 256, "num_gpu_blocks_override": 120, "enable_prefix_caching": False}
    with start(disable_log_stats=False, **options) as engine:
        assert_preemption_is_not_seen(engine, [prompt[:40] for prompt in prompts[1:5]], times=2, max_tokens=110)


@pytest.mark.long
def test_same_compiled(start, alone, prompts):
    with start(enforce_eager=False) as engine:
        assert_all_same(engine.complete(prompts), alone)


def test_sinks_change_what_is_served(start, alone, prompts):
    """The comparisons of this file cover sinks: with them switched off the log-probabilities are others."""
    with start({"sinks": False}) as engine, pytest.raises(AssertionError):
        assert_all_same(engine.complete(prompts), alone)


@pytest.mark.long
def test_same_with_tensor_parallelism(start, alone, prompts, monkeypatch):
    """Two worker processes with a KV head each."""
    # There as here (`made_quickly`).
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with start(tensor_parallel_size=2) as engine:
        assert_all_same(engine.complete(prompts), alone)


def test_reused_blocks_show_nothing_of_their_former_request(start, alone, prompts):
    """Every byte of the cache is NaN before the first request, and after it whatever the former requests left."""
    options = {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 300, "enable_prefix_caching": False}
    with start(**options) as engine:
        engine.fill_with_nan()
        assert_all_same(engine.complete(prompts), alone)
        assert_all_same(engine.complete(prompts[::-1]), alone[::-1])


def test_warming_kernels_up_spoils_no_first_request(start, alone, prompts, monkeypatch):
    """It leaves pages dirty. Those of CPUs need none; here they are warmed up as those of GPUs are."""

    def warm(kernels: dispatch.Kernels) -> dispatch.Kernels:
        def build(layer: LayerState) -> LayerOperations:
            warm_up(kernels.build, layer)
            return kernels.build(layer)

        return replace(kernels, build=build)

    monkeypatch.setattr(dispatch, "KERNELS", tuple(map(warm, dispatch.KERNELS)))
    with start(enable_prefix_caching=False) as engine:
        assert_all_same(engine.complete(prompts), alone)


def test_aborts_leave_every_block_free(start, prompts):
    """In a pool that holds only a few requests at a time."""
    with start(num_gpu_blocks_override=200, max_num_batched_tokens=256, max_model_len=256) as engine:
        assert_aborts_leave_every_block_free(engine, 5 * [prompt[:200] for prompt in prompts])


def test_a_full_pool_keeps_what_prompts_share(start, prompts):
    """Each request holds what the next one hits: none but the first, of which nobody knew it, computes it again."""
    many = [[*prompts[-1][:440], *prompts[5][index : index + 90]] for index in range(60)]
    with start(num_gpu_blocks_override=400, max_num_seqs=32, disable_log_stats=False) as engine:
        answers = engine.complete(many, max_tokens=60)
        assert engine.count("num_preemptions") > 0
        assert sum(each.num_cached_tokens == 384 for each in answers) > 55
        engine.assert_all_blocks_free()
        # The longest request still fits, behind all of them and alone.
        (longest,) = engine.complete([[*prompts[-1][:440], *prompts[-1]][:960]], max_tokens=60)
        assert longest.num_cached_tokens == 384
