"""Pages of all kinds of layers in a folder: with windows, exact, with states, and of what drafts."""

from pathlib import Path
from typing import Any

import pytest

from tests.places import EMBEDDED
from tests.serving.conftest import Completion, Engine, Start, assert_all_same, assert_preemption_is_not_seen, transfer
from tests.serving.drafts import speculation
from tests.serving.test_page_store import HIT, PRESET
from tests.serving.test_speculation import served
from tests.serving.tiny import FAMILY, GEMMA, make_coded

pytestmark = pytest.mark.long

MAX_TOKENS = 24
HYBRIDS = ("lfm2", "lfm2 with large states", "qwen3 next")


@pytest.fixture
def start(start_engine, tmp_path) -> Start:
    """An engine that keeps pages in a folder; the same one each time."""

    def started(model: Path, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        options = {"kv_transfer_config": transfer(tmp_path / "store"), "max_num_batched_tokens": 300, **options}
        return start_engine(model, PRESET, settings, disable_log_stats=False, **options)

    return started


def made(folder: Path, name: str, **changes: Any) -> Path:
    """A model of a family."""
    model_type, own = FAMILY[name]
    return make_coded(folder / "model", model_type, {**own, "max_position_embeddings": 1024, **changes})


def one_by_one(engine: Engine, prompts: list[list[int]], max_tokens: int = 8) -> list[Completion]:
    """Of an empty pool each time."""
    answers = [engine.complete_anew(prompt, max_tokens) for prompt in prompts]
    engine.assert_all_blocks_free()
    return answers


@pytest.mark.parametrize("exact", [[], ["0"], ["1"]], ids=["coded", "a window exact", "no window exact"])
def test_pages_of_layers_with_windows(start, prompts, tmp_path, exact):
    """And of those that `--kv-cache-dtype-skip-layers` names."""
    with start(made(tmp_path, "gemma2", **GEMMA), kv_cache_dtype_skip_layers=exact) as engine:
        engine.complete(prompts[-1:])
        local = engine.complete(prompts[-1:])
        engine.fill_with_nan()
        assert engine.complete_anew(prompts[-1]) == local[0]
        assert local[0].num_cached_tokens == HIT


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_are_found_where_prompts_end_and_part(start_engine, start, prompts, tmp_path, name):
    model = made(tmp_path, name)
    dtype = "bfloat16" if name == "qwen3 next" else "float32"
    whole = prompts[-1]
    some = [whole, *([*whole[:300], *whole[end:]] for end in (350, 351, 352))]
    # Where prompts are cut, states round in 16 bits.
    with start_engine(model, PRESET, dtype=dtype, max_num_batched_tokens=300) as engine:
        alone = one_by_one(engine, some)
    with start(model, dtype=dtype) as engine:
        size = engine.core.scheduler.block_size
        found = one_by_one(engine, some)
        parting, at_end = 300 // size * size, 600 // size * size
        assert [answer.num_cached_tokens for answer in found] == [0, 0, parting, parting]
        assert_all_same(found, alone)
    with start(model, dtype=dtype) as engine:
        engine.fill_with_nan()
        for found in (engine.complete(some), one_by_one(engine, some)):
            assert [answer.num_cached_tokens for answer in found] == [at_end] * len(some)
            assert_all_same(found, alone)
        engine.assert_all_blocks_free()


def test_states_beside_preemption(start, prompts, tmp_path):
    some = [prompts[-1][:300], prompts[4], prompts[6]]
    with start(made(tmp_path, "lfm2"), max_model_len=512, num_gpu_blocks_override=150) as engine:
        assert_preemption_is_not_seen(engine, some, times=2, max_tokens=100, anew=True)
        assert engine.count("external_prefix_cache_hits") > 0


@pytest.fixture(scope="module")
def answered(start_engine, default, prompts) -> list[Any]:
    """Prompts whose answers cross the edges of blocks, these answers without drafts, and what continues both."""
    some = [prompt[:length] for prompt, length in zip(prompts[-3:], (250, 380, 506), strict=True)]
    with start_engine(EMBEDDED, PRESET, default, enable_prefix_caching=False) as engine:
        alone = engine.complete(some, MAX_TOKENS, together=False)
        longer = [[*prompt, *answer.tokens] for prompt, answer in zip(some, alone, strict=True)]
        return [some, alone, longer, engine.complete(longer, MAX_TOKENS, together=False)]


@pytest.mark.parametrize(
    ("method", "num_drafts"),
    [
        ("ngram", 5),
        pytest.param("draft_model", 3, marks=pytest.mark.release),
        pytest.param("eagle", 3, marks=pytest.mark.release),
        pytest.param("mtp", 1, marks=pytest.mark.release),
    ],
)
def test_blocks_that_closed_among_drafts(start, default, answered, tmp_path, method, num_drafts):
    """They serve whoever comes after a restart, beside the pages of what drafts."""
    some, alone, longer, alone_longer = answered
    model, settings = served(method, default, tmp_path)
    options = {"speculative_config": speculation(method, num_drafts, tmp_path), "max_num_batched_tokens": 600}
    with start(model, settings, **options) as engine:
        assert_all_same(one_by_one(engine, some, MAX_TOKENS), alone)
        # Their last blocks are those of the answers.
        found = one_by_one(engine, longer, MAX_TOKENS)
        # Where vLLM takes a block off hits, the pool has the rows of the end of a prompt a block earlier.
        first = [0, 128, 256] if method in ("eagle", "mtp") else [128, 256, 384]
        assert [answer.num_cached_tokens for answer in found] == first
        assert_all_same(found, alone_longer)
    with start(model, settings, **options) as engine:
        found = one_by_one(engine, some, MAX_TOKENS)
        assert [answer.num_cached_tokens for answer in found] == [128, 256, 384]
        assert_all_same(found, alone)
        found = one_by_one(engine, longer, MAX_TOKENS)
        assert [answer.num_cached_tokens for answer in found] == [256, 384, 512]
        assert_all_same(found, alone_longer)
        assert engine.count("spec_decode_num_accepted_tokens") > 0
