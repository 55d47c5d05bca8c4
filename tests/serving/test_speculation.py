"""Greedy answers are, token by token, what they are without speculation, however many drafts are right."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.serving.conftest import EMBEDDED, Completion, Engine, assert_all_same

pytestmark = pytest.mark.serving

PRESET = "antkv-1bit"
Start = Callable[..., Any]
#: Answers cross the edges of blocks.
MAX_TOKENS = 48


def ngram(num_drafts: int) -> dict[str, Any]:
    """One token that was there before is enough for drafts, most of which are wrong."""
    return {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }


def counted(engine: Engine, name: str) -> int:
    """A counter of vLLM's."""
    return sum(metric.value for metric in engine.llm.get_metrics() if metric.name == name)


def assert_drafts_were_right_and_wrong(engine: Engine) -> None:
    proposed, accepted = (counted(engine, f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    assert 0.05 * proposed < accepted < 0.95 * proposed


@pytest.fixture(scope="module")
def alone(start_engine: Start, default: dict[str, Any], prompts: list[list[int]]) -> list[Completion]:
    """Without speculation, one request at a time."""
    with start_engine(EMBEDDED, PRESET, default, enable_prefix_caching=False) as engine:
        return engine.complete(prompts, MAX_TOKENS, together=False)


@pytest.fixture(scope="module")
def auto(start_engine: Start, prompts: list[list[int]]) -> list[Completion]:
    """Without us, without speculation."""
    with start_engine(EMBEDDED, "auto") as engine:
        return engine.complete(prompts, MAX_TOKENS)


@pytest.mark.parametrize(
    "settings", [{"recency": "sliding:1024"}, {"anchor_share": 1.0, "anchor_dtype": "model"}], ids=str
)
def test_equals_auto_where_every_token_is_exact(
    start_engine: Start,
    default: dict[str, Any],
    auto: list[Completion],
    prompts: list[list[int]],
    settings: dict[str, Any],
) -> None:
    options = {"speculative_config": ngram(3), "max_num_batched_tokens": 300, "disable_log_stats": False}
    with start_engine(EMBEDDED, PRESET, default | settings, **options) as engine:
        assert_all_same(engine.complete(prompts, MAX_TOKENS), auto)
        assert_drafts_were_right_and_wrong(engine)


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_same_as_without_speculation(
    start_engine: Start,
    default: dict[str, Any],
    alone: list[Completion],
    prompts: list[list[int]],
    num_drafts: int,
) -> None:
    """Alone, in batches, in chunks, and behind prefixes that were found."""
    options = {"speculative_config": ngram(num_drafts), "max_num_batched_tokens": 200, "disable_log_stats": False}
    with start_engine(EMBEDDED, PRESET, default, **options) as engine:
        assert_all_same(engine.complete(prompts, MAX_TOKENS, together=False), alone)
        hits = engine.complete(prompts, MAX_TOKENS)
        assert any(completion.num_cached_tokens for completion in hits)
        assert_all_same(hits, alone)
        # Blocks that closed among drafts serve whoever comes next.
        longer = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, alone, strict=True)]
        with_hits = engine.complete(longer, MAX_TOKENS)
        assert_drafts_were_right_and_wrong(engine)
        engine.assert_all_blocks_free()
    with start_engine(EMBEDDED, PRESET, default, enable_prefix_caching=False) as engine:
        assert_all_same(with_hits, engine.complete(longer, MAX_TOKENS))


def test_same_after_preemption(start_engine: Start, default: dict[str, Any], prompts: list[list[int]]) -> None:
    short = [prompt[:40] for prompt in prompts[1:9]]
    options = {"max_model_len": 256, "enable_prefix_caching": False}
    with start_engine(EMBEDDED, PRESET, default, **options) as engine:
        alone = engine.complete(short, 110, together=False)
    options |= {"num_gpu_blocks_override": 120, "disable_log_stats": False, "speculative_config": ngram(3)}
    with start_engine(EMBEDDED, PRESET, default, **options) as engine:
        assert_all_same(engine.complete(short, 110), alone)
        assert counted(engine, "vllm:num_preemptions") > 0
        assert_drafts_were_right_and_wrong(engine)
        engine.assert_all_blocks_free()
