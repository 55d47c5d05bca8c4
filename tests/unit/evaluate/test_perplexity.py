"""Perplexity, the bits beside it, and the gap closed."""

import math
from pathlib import Path

import pytest
import torch

from tests.unit.evaluate.conftest import VOCAB
from tests.unit.spoilt import MODEL
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError
from vllm_antkv.evaluate.effective_bits import effective_bits
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.evaluate.perplexity import evaluate_perplexity
from vllm_antkv.evaluate.report import PerplexityReport, gap_closed
from vllm_antkv.evaluate.windows import TextWindows
from vllm_antkv.offline import score as score_module
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.score import score
from vllm_antkv.presets import PRESETS


@pytest.fixture(scope="module")
def card(model_folder):
    return ModelCard.read(str(model_folder))


@pytest.fixture(scope="module")
def loaded(card):
    return card.load()


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.randint(3, VOCAB, (5, 300), generator=torch.Generator().manual_seed(2))


FP16 = Method("fp16", 16.0, AntKVConfig())


def test_fp16_is_the_models_own_loss(loaded, windows):
    with torch.inference_mode():
        loss = loaded(windows, labels=windows).loss.item()
    assert score(loaded, FP16, windows).nll == pytest.approx(loss, rel=1e-5)


def test_the_figure_does_not_depend_on_batches(card, loaded, windows, codebook_folder, monkeypatch):
    method = build_method(
        "antkv-1bit", MethodRequest("tiny", card.identity, codebook_folder, AntKVConfig(anchor_share=0.05))
    )
    together = score(loaded, method, windows).nll
    monkeypatch.setattr(score_module, "_TOKENS_PER_PASS", 1)
    done = []
    assert score(loaded, method, windows, done.append).nll == pytest.approx(together, rel=1e-5)
    assert done == [1] * 5


def test_the_report_says_what_was_measured(card, loaded, windows):
    report = evaluate_perplexity(card, loaded, FP16, TextWindows(Path("text.txt"), windows))
    assert (report.windows, report.context, report.tokens) == (5, 300, 5 * 299)
    assert report.perplexity == pytest.approx(math.exp(report.nll))
    assert (report.nominal_bits, report.effective_bits) == (16, 16)


def test_predictions_are_compared_with_the_models_own(card, loaded, windows, codebook_folder):
    request = MethodRequest("tiny", card.identity, codebook_folder, AntKVConfig(recency="none", prefix=0))
    method = build_method("antkv-1bit", request)
    fidelity = score(loaded, method, windows, against_own=True).fidelity
    with torch.inference_mode():
        own = loaded(windows).logits[:, :-1].log_softmax(-1)
        with quantised_past(loaded, method, windows.shape[1]):
            found = loaded(windows).logits[:, :-1].log_softmax(-1)
    divergence = (own.exp() * (own - found)).sum(-1).mean(0)
    assert fidelity.kl == pytest.approx(divergence.mean().item(), rel=1e-4)
    assert [band.first for band in fidelity.by_position] == [0, 128, 256]
    assert fidelity.by_position[1].kl == pytest.approx(divergence[128:256].mean().item(), rel=1e-4)
    grown = (own - found).gather(-1, windows[:, 1:, None])[:, 256:].mean().item()
    assert fidelity.by_position[2].loss == pytest.approx(grown, rel=1e-3)
    assert fidelity.top1_agreement == pytest.approx((own.argmax(-1) == found.argmax(-1)).float().mean().item())
    assert 0 < fidelity.top1_agreement < 1
    itself = score(loaded, FP16, windows, against_own=True).fidelity
    assert (itself.kl, itself.top1_agreement) == (0, 1)


@pytest.mark.parametrize("context", [1, 513])
def test_windows_that_do_not_fit_the_model(card, loaded, refused, context):
    windows = TextWindows(Path("text.txt"), torch.ones(1, context, dtype=torch.int64))
    with refused(SettingsError, str(context)):
        evaluate_perplexity(card, loaded, FP16, windows)


def bits(context: int, **settings: object) -> float:
    identity = MODEL.model_copy(update={"head_size": 64})
    config = AntKVConfig.model_validate({"anchor_share": 0, "sinks": False, "prefix": 0, "recency": "none", **settings})
    method = Method("antkv-1bit", 1.0, config, layers=(PRESETS["antkv-1bit"],) * identity.num_layers)
    return effective_bits(method, identity, torch.bfloat16, context)


def test_every_row_that_is_kept_is_counted():
    """Two anchor rows of K and of V per block of 128 tokens at 8 bits, and 16 tokens of recency at 16."""
    assert bits(2048, anchor_share=0.015) >= 1 + 2 * 8 / 128
    assert bits(2048, recency="sliding:16") >= 1 + 16 * 15 / 2048
    assert bits(2048, prefix=64) >= 1 + 16 * 64 / 2048
    assert bits(65536, recency="sliding:16") < 1.05


def result(method: str, value: float) -> PerplexityReport:
    return PerplexityReport.model_construct(method=method, perplexity=value)


def test_gap_closed_compares_with_the_same_bits():
    results = [result("fp16", 4.0), result("cq-1bit", 8.0), result("antkv-1bit", 5.0), result("antkv-2bit", 4.1)]
    assert gap_closed(results) == {"antkv-1bit": 0.75}


@pytest.mark.parametrize(
    "values",
    [{"cq-1bit": 8.0, "antkv-1bit": 5.0}, {"fp16": 4.0, "antkv-1bit": 5.0}, {"fp16": 4, "cq-1bit": 4, "antkv-1bit": 4}],
    ids=["no fp16", "no baseline", "a baseline that loses nothing"],
)
def test_no_gap_without_both_ends(values):
    assert gap_closed([result(*each) for each in values.items()]) == {}
