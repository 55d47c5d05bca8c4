"""Models with sliding windows, soft caps and learned sinks, in real vLLM with random weights.

Windows of a few blocks, so that prompts and answers outgrow them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.serving.conftest import PRESET, Completion, Engine, Start, assert_all_same, assert_scheduling_is_not_seen
from tests.serving.served_family import SINKS, assert_as_expected, expected_logprobs
from tests.serving.tiny import EXPERTS, make_coded
from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import PageLayout, pool_block_bytes
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.presets import PRESETS

#: Two blocks and a bit.
WINDOW = 300
MAX_LEN = 1024


@dataclass(frozen=True)
class Case:
    """A model.

    changes: to the sizes of `tests.serving.tiny`.
    layers: the preset of each layer; None: the same for all.
    """

    model_type: str
    changes: dict[str, Any]
    layers: tuple[str, ...] | None = None


#: With weights that are large enough for logits to reach a soft cap.
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "initializer_range": 0.2, "tie_word_embeddings": True}
FIVE_OF_SIX = GEMMA | {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}
CASES = {
    "windows alone": Case("mistral", {"head_dim": 32}),
    "windows in every second layer, soft caps": Case("gemma2", GEMMA | {"attn_logit_softcapping": 1.0}),
    "windows in every second layer, learned sinks": Case(
        "gpt_oss", EXPERTS | {"head_dim": 64, "initializer_range": 0.1}
    ),
    "windows in five of six layers, two bases": Case("gemma3_text", FIVE_OF_SIX),
    "windows in five of six layers, mixed": Case(
        "gemma3_text",
        FIVE_OF_SIX,
        ("antkv-2bit", "antkv-0.25bit", "antkv-0.5bit", "antkv-1bit", "antkv-0.5bit", "antkv-1bit"),
    ),
}


#: `make test` runs these; `make test-long` the others.
QUICK = ("windows alone", "windows in five of six layers, mixed")
MODELS = [pytest.param(case, id=name, marks=[] if name in QUICK else pytest.mark.long) for name, case in CASES.items()]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    case: Case = request.param
    sizes = case.changes | {"max_position_embeddings": MAX_LEN, "sliding_window": WINDOW}
    return make_coded(folder, case.model_type, sizes, sinks=SINKS, layers=case.layers)


@pytest.fixture
def start(start_engine, model) -> Start:
    def started(settings: dict[str, Any] | None = None, **options: Any) -> Any:
        return start_engine(model, PRESET, settings, max_model_len=MAX_LEN, **options)

    return started


@pytest.fixture(scope="module")
def auto(start_engine, model, texts) -> list[Completion]:
    """What the model answers without an antkv cache."""
    with start_engine(model, "auto", max_model_len=MAX_LEN) as engine:
        return engine.complete(texts)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return [[0, *range(3 + 2 * i, 2 + 2 * i + length)] for i, length in enumerate((5, 127, 128, 300, 431, 700))]


@pytest.mark.parametrize("windows", ["coded", pytest.param("exact", marks=pytest.mark.long)])
def test_serves_what_the_evaluator_computes(start, model, texts, auto, windows):
    expected = expected_logprobs(model, PRESET, prompts=texts, windows=windows)
    with start(settings={"windows": windows}, max_num_batched_tokens=256) as engine:
        served = engine.complete(texts)
        engine.assert_all_blocks_free()
    assert_as_expected(served, expected)
    if windows == "exact" and AutoConfig.from_pretrained(model).model_type == "mistral":
        assert_all_same(served, auto)
    else:
        # Layers that are coded make the difference.
        with pytest.raises(AssertionError):
            assert_all_same(served, auto)


def test_same_however_a_prompt_is_chunked_batched_or_cached(start, texts):
    with start(max_num_batched_tokens=1024, prefix_cache_retention_interval=256) as engine:
        assert_scheduling_is_not_seen(engine, texts, chunks=[130, 200])


def blocks_of_windows(engine: Engine) -> int:
    """Blocks that requests hold for layers with windows, of VQ pages and of recency pages."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    from vllm_antkv.vllm_adapter.block_pool.managers import RecencyManager

    held = 0
    for manager in engine.core.scheduler.kv_cache_manager.coordinator.single_type_managers:
        of_windows = isinstance(manager, RecencyManager) and manager.kv_cache_spec.window is not None
        if of_windows or isinstance(manager, SlidingWindowManager):
            held += sum(not block.is_null for blocks in manager.req_to_blocks.values() for block in blocks)
    return held


def planned(case: Case, window: int, length: int) -> int:
    """Blocks of a sequence that `antkv plan` reckons with, of either class, for layers with windows."""
    layout = PageLayout.of(AntKVConfig(), PRESETS[PRESET], case.changes["head_dim"], torch.float32)
    return footprint([layout], AntKVConfig(), length, [window]).total // pool_block_bytes([layout])


@pytest.mark.long
@pytest.mark.parametrize("name", ["windows alone", "windows in every second layer, soft caps"])
def test_blocks_in_use_stay_bounded_while_six_windows_are_generated(start_engine, tmp_path, name):
    from vllm_antkv.vllm_adapter.block_pool.requests import tokens_in_use

    case, window = CASES[name], 128
    length = 7 * window + 100
    make_coded(tmp_path, case.model_type, case.changes | {"max_position_embeddings": length, "sliding_window": window})
    with start_engine(tmp_path, PRESET, max_model_len=length) as engine:
        engine.add("0", [0, *range(3, 3 + window)], max_tokens=6 * window)
        held, tokens = [], []
        for _ in engine.steps():
            held.append(blocks_of_windows(engine))
            tokens.append(tokens_in_use(engine.core.scheduler))
        assert len(held) >= 6 * window
        assert 0 < max(held[4 * window :]) <= max(held[: 4 * window])
        # What is planned with is what is held; what dies in a step is freed before the next.
        for step in range(4 * window, len(held) - 1, 37):
            computed = window + 1 + step
            assert planned(case, window, computed) <= held[step] <= planned(case, window, computed - 1) + 2
        if name == "windows alone":
            assert max(tokens) <= window + 2 * VQ_BLOCK_SIZE
        else:
            assert max(tokens) >= 6 * window, "the layers without a window hold all"
        engine.assert_all_blocks_free()
