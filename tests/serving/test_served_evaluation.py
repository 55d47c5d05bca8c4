"""What is served is what was evaluated: perplexity through real vLLM against the offline evaluator."""

from pathlib import Path

import pytest
import torch

from tests.codebooks import interleaved_and_scaled, random_codebook
from tests.serving.conftest import EMBEDDED, PRESET, TEXT
from vllm_antkv.codebook import SinkRule, codebook_path
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.evaluate.perplexity import evaluate_perplexity
from vllm_antkv.evaluate.report import PerplexityReport
from vllm_antkv.evaluate.served import evaluate_served
from vllm_antkv.evaluate.windows import TextWindows, load_windows
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.presets import get_preset

CONTEXT, NUM_WINDOWS = 500, 2
#: Of the embedded model, no more bytes than 1 bit for all.
LAYERS = ("antkv-0.375bit", "antkv-2bit", "antkv-1bit", "antkv-0.75bit", "antkv-0.5bit")


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return ModelCard.read(str(EMBEDDED))


@pytest.fixture(scope="module")
def windows(card) -> torch.Tensor:
    return load_windows(TEXT, card.tokenizer, CONTEXT, NUM_WINDOWS)


@pytest.fixture(scope="module")
def codebooks(card, tmp_path_factory) -> Path:
    """Random centroids for interleaved channels: they lose so much that any difference in what is seen shows.

    Each layer has another preset, and K is scaled.
    """
    folder = tmp_path_factory.mktemp("codebooks")
    rule = SinkRule(layer=0, channels=(0, 1), threshold=1.0)
    codebook = interleaved_and_scaled(random_codebook(card.identity, sinks=rule, layers=LAYERS))
    codebook.save(codebook_path(folder, PRESET))
    return folder


def offline(card: ModelCard, name: str, config: AntKVConfig, windows: torch.Tensor) -> PerplexityReport:
    folder = None if config.codebooks is None else Path(config.codebooks)
    method = build_method(name, MethodRequest(card.name, card.identity, folder, config))
    return evaluate_perplexity(card, card.load(), method, TextWindows(TEXT, windows), against_own=True)


def test_served_agrees_with_offline(card, windows, codebooks, eager):
    config = AntKVConfig(codebooks=str(codebooks))
    served = evaluate_served(card, PRESET, config, TextWindows(TEXT, windows))
    assert served.tokens == NUM_WINDOWS * (CONTEXT - 1)
    assert served.perplexity == pytest.approx(offline(card, PRESET, config, windows).perplexity, rel=0.005)
    assert served.settings["kv_cache_dtype"] == PRESET
    assert served.nominal_bits == sum(get_preset(name).nominal_bits for name in LAYERS) / len(LAYERS)


def test_auto_is_fp16_and_the_distance_from_it_is_that_of_the_evaluator(card, windows, codebooks, eager):
    settings = {"anchor_share": 0.05, "anchor_dtype": "model", "recency": "none", "prefix": 0}
    config = AntKVConfig(codebooks=str(codebooks), **settings)
    served = evaluate_served(card, PRESET, config, TextWindows(TEXT, windows), against="auto")
    expected, auto = offline(card, PRESET, config, windows), served.against
    assert served.perplexity == pytest.approx(expected.perplexity, rel=0.005)
    assert auto.kv_cache_dtype == "auto"
    assert auto.perplexity == pytest.approx(offline(card, "fp16", AntKVConfig(), windows).perplexity, rel=0.005)
    assert auto.top1_agreement == pytest.approx(expected.fidelity.top1_agreement, abs=0.03)
    # vLLM hands out the most likely tokens alone: a bound from below.
    assert 0.05 * expected.fidelity.kl < auto.kl < expected.fidelity.kl


def test_a_refusal_of_vllm_is_one_sentence(card, windows, eager, refused, tmp_path):
    with refused(UnsupportedModelError, "antkv calibrate"):
        evaluate_served(card, PRESET, AntKVConfig(codebooks=str(tmp_path)), TextWindows(TEXT, windows))
