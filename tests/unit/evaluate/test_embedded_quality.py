"""On the models of this repository: what the papers say of methods, settings and codebooks, by more than noise."""

import pydoc_data.topics

import pytest
import torch

from tests.places import ROOT
from vllm_antkv.calibrate.mix import mix
from vllm_antkv.calibrate.run import calibrate
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.codebook import Codebook, find_codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.evaluate.windows import load_windows
from vllm_antkv.offline.divergences import layer_divergences
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.score import score
from vllm_antkv.offline.vector_quantiser import VectorQuantiser
from vllm_antkv.presets import get_preset

pytestmark = pytest.mark.long

PRESET = get_preset("antkv-1bit")


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return ModelCard.read(str(ROOT / "models" / "embedded"))


@pytest.fixture(scope="module")
def model(card):
    return card.load()


@pytest.fixture(scope="module")
def windows(card) -> torch.Tensor:
    return load_windows(ROOT / "LICENSE", card.tokenizer, context=768)[:2]


def test_more_bits_and_anchors_come_closer_with_shipped_codebooks(card, model, windows):
    """KL divergence from the model's own predictions; margins are half of what was measured, or wider."""

    def divergence(name: str, recency: str, anchor_share: float = 0.01) -> float:
        config = AntKVConfig(anchor_share=anchor_share, recency=recency, prefix=0, sinks=False)
        method = build_method(name, MethodRequest(card.name, card.identity, None, config))
        return score(model, method, windows[:1], against_own=True).fidelity.kl

    by_bits = {bits: divergence(f"antkv-{bits}bit", "none") for bits in (1, 2, 4)}
    assert by_bits[4] < 0.4 * by_bits[2] < 0.4 * 0.6 * by_bits[1]
    assert divergence("antkv-1bit", "sliding:32", 0.05) < 0.9 * divergence("antkv-1bit", "sliding:32", 0.0)


def test_mixed_layers_are_ahead_of_one_preset_for_all(card, model, windows):
    """At no more bytes, chosen on one page and measured on another; half of the measured margin."""
    names = ("antkv-2bit", "antkv-1bit", "antkv-0.5bit")
    books = [Codebook.load(find_codebook(card.name, card.identity, name)) for name in names]
    found = layer_divergences(model, books, windows[:1], lambda: None).nats
    mixed = mix(get_preset("antkv-1bit"), books, found)
    before, after = (
        score(model, Method("x", 1.0, AntKVConfig(), VectorQuantiser(book)), windows[1:2], against_own=True).fidelity.kl
        for book in (books[1], mixed)
    )
    assert after < 0.8 * before


def test_antkv_is_ahead_of_cq_at_one_bit(card, model, tmp_path):
    """As served, learned from one text and measured on another. Six seeds gave 0.49 to 0.62."""
    file = tmp_path / "text.txt"
    # Technical English that comes with Python.
    file.write_text("\n".join(pydoc_data.topics.topics.values())[:150_000])
    learn = {"presets": [PRESET.name], "texts": [str(file)], "samples": 8, "seq_len": 512, "device": "cpu"}
    calibrate(CalibrationSettings(card.name, out=tmp_path, **learn))
    plain = {"weights": "none", "channels": "consecutive", "bits": "uniform"}
    calibrate(CalibrationSettings(card.name, out=tmp_path / "cq", **plain, **learn))
    seen = load_windows(ROOT / "LICENSE", card.tokenizer, context=512)[:2]

    def divergence(method: str) -> float:
        config = AntKVConfig(anchor_share=0.01, recency="sliding:32", prefix=0, sinks=False)
        built = build_method(method, MethodRequest(card.name, card.identity, tmp_path, config))
        return score(model, built, seen, against_own=True).fidelity.kl

    assert divergence("antkv-1bit") < 0.8 * divergence("cq-1bit")
