"""Greedy answers are, token by token, what they are without speculation, however many drafts are right."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.serving.conftest import EMBEDDED, PRESET, Completion, Engine, Start, assert_all_same
from tests.serving.drafts import make_glm, speculation
from vllm_antkv.codebook import Codebook, ModelIdentity, codebook_path

NEEDS_SUFFIX_TREES = pytest.mark.skipif(
    importlib.util.find_spec("arctic_inference") is None, reason="needs arctic-inference, which has no wheels for CPUs"
)
DRAFTS_OF_MODELS = [("draft_model", 3), ("eagle", 3), ("eagle3", 2), ("mtp", 1), ("mtp", 3)]
#: Where another test drafts alike: after preemption, or on two ranks.
SLOW_VARIANTS = (("draft_model", 3), ("eagle", 3), ("eagle3", 2), ("mtp", 1))
#: Answers cross the edges of blocks.
MAX_TOKENS = 24


def marks_of(method: str, num_drafts: int) -> list[pytest.MarkDecorator]:
    """Whether `make test-long` runs a kind of drafts."""
    return [pytest.mark.long, *([pytest.mark.release] if (method, num_drafts) in SLOW_VARIANTS else [])]


def assert_drafts_were_right_and_wrong(engine: Engine) -> None:
    proposed, accepted = (engine.count(f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    assert 0.05 * proposed < accepted < 0.95 * proposed


def served(method: str, default: dict[str, Any], folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model that answers as the embedded one, and settings that are the default ones."""
    if method != "mtp":
        return EMBEDDED, default
    model = make_glm(folder / "model")
    codebook = Codebook.load(codebook_path(Path(default["codebooks"]), PRESET))
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(model))
    header = codebook.header.model_copy(update={"model": identity})
    replace(codebook, header=header).save(codebook_path(folder, PRESET))
    return model, {**default, "codebooks": str(folder)}


@pytest.fixture
def drafting(start_engine, default, tmp_path) -> Start:
    """An engine that answers as the embedded model, with drafts."""

    def start(method: str, num_drafts: int, settings: Mapping[str, Any] = {}, **options: Any) -> Any:
        model, own = served(method, default, tmp_path)
        options |= {"speculative_config": speculation(method, num_drafts, tmp_path), "disable_log_stats": False}
        return start_engine(model, PRESET, own | settings, **options)

    return start


#: Prompts, and what they are answered without speculation, one request at a time.
Answered = tuple[list[list[int]], list[Completion]]


@pytest.fixture(scope="module")
def alone(start_engine, default, prompts) -> tuple[Answered, Answered]:
    """Every second prompt, and what continues its answer."""
    prompts = prompts[1::2]
    with start_engine(EMBEDDED, PRESET, default, enable_prefix_caching=False) as engine:
        answers = engine.complete(prompts, MAX_TOKENS, together=False)
        longer = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
        return (prompts, answers), (longer, engine.complete(longer, MAX_TOKENS, together=False))


@pytest.fixture(scope="module")
def auto(start_engine, prompts) -> list[Completion]:
    """Without us, without speculation."""
    with start_engine(EMBEDDED, "auto") as engine:
        return engine.complete(prompts, MAX_TOKENS)


@pytest.mark.parametrize(
    ("method", "num_drafts", "settings"),
    [
        pytest.param("ngram", 5, {"recency": "sliding:1024"}, marks=pytest.mark.long),
        ("ngram", 5, {"anchor_share": 1.0, "anchor_dtype": "model"}),
        pytest.param("mtp", 1, {"anchor_share": 1.0, "anchor_dtype": "model"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_equals_auto_where_every_token_is_exact(drafting, auto, prompts, method, num_drafts, settings):
    with drafting(method, num_drafts, settings, max_num_batched_tokens=300) as engine:
        assert_all_same(engine.complete(prompts, MAX_TOKENS), auto)
        assert_drafts_were_right_and_wrong(engine)


@pytest.mark.parametrize(
    ("method", "num_drafts"),
    [
        ("ngram", 1),
        pytest.param("suffix", 3, marks=[pytest.mark.long, NEEDS_SUFFIX_TREES]),
        *(pytest.param(*kind, marks=marks_of(*kind)) for kind in DRAFTS_OF_MODELS),
    ],
)
def test_same_as_without_speculation(drafting, alone, method, num_drafts):
    """Alone, in batches, in chunks, and behind prefixes that were found."""
    (prompts, answers), (longer, answers_of_longer) = alone
    with drafting(method, num_drafts, max_num_batched_tokens=200) as engine:
        assert_all_same(engine.complete(prompts, MAX_TOKENS, together=False), answers)
        hits = engine.complete(prompts, MAX_TOKENS)
        assert any(completion.num_cached_tokens for completion in hits)
        assert_all_same(hits, answers)
        # Blocks that closed among drafts serve whoever comes next.
        assert_all_same(engine.complete(longer, MAX_TOKENS), answers_of_longer)
        # That head of EAGLE-3 guesses at random.
        if method != "eagle3":
            assert_drafts_were_right_and_wrong(engine)
        engine.assert_all_blocks_free()


@pytest.mark.long
def test_same_with_tensor_parallelism(drafting, alone, monkeypatch):
    """Two worker processes with a KV head each, and one of what drafts that both have."""
    # There as here (`made_quickly`).
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    (prompts, answers), _ = alone
    with drafting("eagle", 3, tensor_parallel_size=2) as engine:
        assert_all_same(engine.complete(prompts, MAX_TOKENS), answers)
        assert_drafts_were_right_and_wrong(engine)


# Blocks with pages of a draft model have larger recency pages, of which a request needs fewer.
@pytest.mark.long
@pytest.mark.parametrize(("method", "num_blocks"), [("ngram", 120), ("draft_model", 40)])
def test_same_after_preemption(start_engine, drafting, default, prompts, method, num_blocks):
    short = [prompt[:40] for prompt in prompts[1:5]]
    options = {"max_model_len": 256, "enable_prefix_caching": False}
    with start_engine(EMBEDDED, PRESET, default, **options) as engine:
        alone = engine.complete(short, 110, together=False)
    with drafting(method, 3, num_gpu_blocks_override=num_blocks, **options) as engine:
        assert_all_same(engine.complete(2 * short, 110), 2 * alone)
        assert engine.count("num_preemptions") > 0
        assert_drafts_were_right_and_wrong(engine)
        engine.assert_all_blocks_free()
