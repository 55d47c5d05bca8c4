"""KVSink on a model whose sinks sit beyond the first tokens: found where they were planted, and worth keeping.

What a method loses is measured as KL divergence from the model's own predictions: perplexity on two pages is mostly
noise.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from research.literature.registry import build_method
from research.literature.request import LiteratureRequest
from research.literature.sample import take_sample
from research.planted import (
    CONTEXT,
    LAYER,
    PRESET,
    calibrated_rule,
    is_planted,
    plant_embedded,
    text_windows,
    write_codebook,
)
from vllm_antkv.codebook import SinkRule
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.hidden import captured_hidden
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import ModelCard, decoder_layers


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return ModelCard.read(str(plant_embedded(tmp_path_factory.mktemp("planted") / "model")))


@pytest.fixture(scope="module")
def model(card: ModelCard):
    return card.load()


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    """Without the one that the keys were fitted on."""
    return text_windows(4)[1:]


@pytest.fixture(scope="module")
def rule(model, windows: torch.Tensor) -> SinkRule:
    return calibrated_rule(model, windows)


@pytest.fixture(scope="module")
def loss(model, windows: torch.Tensor) -> Callable[[Method], float]:
    @torch.inference_mode()
    def log_probs(method: Method) -> torch.Tensor:
        with quantised_past(model, method, CONTEXT):
            return model(windows[1:], use_cache=False).logits.log_softmax(-1)

    own = log_probs(Method("fp16", 16.0, AntKVConfig()))
    return lambda method: (own.exp() * (own - log_probs(method))).sum(-1).mean().item()


def test_calibration_finds_what_was_planted(model, windows: torch.Tensor, rule: SinkRule) -> None:
    assert rule.layer == LAYER
    states: list[torch.Tensor] = []
    with torch.no_grad(), captured_hidden([decoder_layers(model)[LAYER]], states.append):
        for window in windows:
            model(window[None])
    flagged = (torch.stack(states)[..., list(rule.channels)].abs() > rule.threshold).any(-1)
    assert torch.equal(flagged, is_planted(windows))


def test_sinks_are_worth_more_than_first_tokens(card: ModelCard, model, windows: torch.Tensor, loss) -> None:
    """KVSink, figure 9 and table 2; five tokens each, and [BOS] is among both."""
    config = AntKVConfig(recency="none", prefix=0)
    request = LiteratureRequest(card.name, card.identity, None, config, sample=take_sample(model, windows[:1], "text"))
    nothing, first, sinks = (
        loss(build_method("kvquant-2bit" + addition, request)) for addition in ("", "+pfn-5", "+kvsink-5")
    )
    assert first < nothing
    assert sinks < 0.6 * first


def test_sinks_of_the_served_method_are_worth_more_than_its_prefix(card: ModelCard, rule: SinkRule, loss) -> None:
    write_codebook(Path(card.name), rule)
    lost = {}
    for name, settings in {"nothing": {"sinks": False}, "prefix": {"sinks": False, "prefix": 5}, "sinks": {}}.items():
        config = AntKVConfig.model_validate({"recency": "none", "prefix": 0, "anchor_share": 0.0, **settings})
        lost[name] = loss(build_method(PRESET, LiteratureRequest(card.name, card.identity, None, config)))
    assert lost["prefix"] < lost["nothing"]
    assert lost["sinks"] < 0.7 * lost["prefix"]
