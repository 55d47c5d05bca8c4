"""The trained prefix in real engines: prompts that start with it get it however they are cut, and no others do."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.serving.conftest import EMBEDDED, Completion, Engine, assert_all_same
from vllm_antkv.codebook import Codebook, ModelIdentity, codebook_path
from vllm_antkv.codebook.prefix import TrainedPrefix
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.laboratory.base import MethodRequest
from vllm_antkv.offline.attention import quantised_past

pytestmark = pytest.mark.serving

PRESET = "antkv-1bit"
#: Longer than a recency page of 8 tokens, and not a multiple of it.
LENGTH = 21
CONTEXT = 512


@pytest.fixture(scope="module")
def asked(prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Prompts with the whole prefix, by what comes after it, and prompts that are to be left alone."""
    ids, other = prompts[-1], prompts[-1][300:]
    prefix = ids[:LENGTH]
    return {
        "trained": [prefix, [*prefix, *other[:1]], ids[:140], ids[:300], [*ids[:256], *other[:60]]],
        # Shorter than the prefix; leaving it at its last token, after two recency pages; earlier; BOS alone.
        "untouched": [prefix[:-1], [*prefix[:-1], *other[:200]], [*ids[:8], *other[:270]], [ids[0], *other[:150]]],
    }


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folders(codebooks: str, model: PreTrainedModel, asked: dict, tmp_path_factory) -> dict[str, str]:
    """Codebooks with a prefix whose rows are far from the model's own, and without."""
    codebook = Codebook.load(codebook_path(Path(codebooks), PRESET))
    ids = tuple(asked["trained"][0])
    shape = (2, codebook.header.model.num_layers, LENGTH, codebook.header.model.num_kv_heads, 64)
    with torch.inference_mode():
        layers = model(torch.tensor([ids]), use_cache=True).past_key_values.layers
    own = torch.stack([torch.stack((layer.keys[0], layer.values[0])).transpose(1, 2) for layer in layers], dim=1)
    rows = own + 0.5 * own.std() * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("trained")
    codebook.with_prefix(TrainedPrefix(ids, *rows)).save(codebook_path(folder, PRESET))
    return {"trained": str(folder), "plain": codebooks}


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., Any], folders: dict[str, str], asked: dict) -> dict[str, list[Completion]]:
    """What is served without a trained prefix, as many tokens exact; one request at a time."""
    settings = {"codebooks": folders["plain"], "prefix": LENGTH}
    with start_engine(EMBEDDED, PRESET, settings, max_num_batched_tokens=1024) as engine:
        return {kind: engine.complete(prompts, together=False) for kind, prompts in asked.items()}


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Any], folders: dict[str, str], plain: Any) -> Iterator[Engine]:
    """The setting `prefix` is shorter than the trained one, which makes room for itself."""
    settings = {"codebooks": folders["trained"], "prefix": 2}
    with start_engine(EMBEDDED, PRESET, settings, max_num_batched_tokens=310) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine: Engine, asked: dict) -> list[Completion]:
    """One request at a time, whole prompts, nothing shared."""
    completions = []
    for prompt in asked["trained"]:
        engine.llm.reset_prefix_cache()
        completions += engine.complete([prompt])
    return completions


def test_other_prompts_are_served_bit_for_bit_as_without_a_trained_prefix(engine, asked, plain) -> None:
    engine.llm.reset_prefix_cache()
    for mine, theirs in zip(engine.complete(asked["untouched"], together=False), plain["untouched"], strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.top_logprobs == theirs.top_logprobs


def test_prompts_with_the_prefix_are_served_as_the_evaluator_computes_them(
    alone, plain, asked, folders, model: PreTrainedModel
) -> None:
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(EMBEDDED))
    request = MethodRequest(str(EMBEDDED), identity, Path(folders["trained"]), AntKVConfig(prefix=2))
    method = build_method(PRESET, request)
    for prompt, served, before in zip(asked["trained"], alone, plain["trained"], strict=True):
        with torch.inference_mode(), quantised_past(model, method, CONTEXT):
            expected = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].log_softmax(-1)
        for token, logprob in served.top_logprobs[0].items():
            assert logprob == pytest.approx(float(expected[token]), abs=1e-3)
        assert any(abs(logprob - float(expected[token])) > 0.02 for token, logprob in before.top_logprobs[0].items())


@pytest.mark.long
def test_the_same_where_blocks_are_found_in_the_cache(engine, asked, plain, alone) -> None:
    """Prompts that leave the prefix go first: blocks of their first tokens are there to be mistaken for others'."""
    for first, then, expected in (("trained", "untouched", plain["untouched"]), ("untouched", "trained", alone)):
        engine.llm.reset_prefix_cache()
        for kind in (first, then):
            engine.complete(asked[kind], together=False)
        again = engine.complete(asked[then], together=False)
        assert sum(completion.num_cached_tokens >= 128 for completion in again) >= 2
        assert_all_same(again, expected)


def test_the_same_when_batched_and_cut_within_the_prefix(engine, asked, plain, alone) -> None:
    # 310 tokens are a step: the second prompt is cut after 10 tokens, or after one.
    for first in (300, 309):
        engine.llm.reset_prefix_cache()
        prompts = [[7] * first, asked["trained"][3], asked["untouched"][1], *asked["trained"]]
        assert_all_same(engine.complete(prompts)[1:], [alone[3], plain["untouched"][1], *alone])
    engine.assert_all_blocks_free()
