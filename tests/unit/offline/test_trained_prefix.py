"""The trained prefix in the offline attention: in windows that start with its tokens, and in no others."""

from dataclasses import replace

import pytest
import torch

from tests.codebooks import random_codebook
from tests.unit.evaluate.conftest import VOCAB
from vllm_antkv.codebook import Codebook, ModelIdentity
from vllm_antkv.codebook.prefix import TrainedPrefix
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.vector_quantiser import VectorQuantiser

IDS = (1, 9, 17)


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    """The first and the last start with the prefix; the second leaves it at its last token."""
    windows = torch.randint(3, VOCAB, (4, 300), generator=torch.Generator().manual_seed(0))
    windows[:, :3] = torch.tensor([IDS, (1, 9, 18), (1, 10, 17), IDS])
    return windows


@pytest.fixture(scope="module")
def own(model, windows) -> TrainedPrefix:
    """What training starts from."""
    with torch.inference_mode():
        layers = model(windows[:1, :3], use_cache=True).past_key_values.layers
    rows = (torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in layers]) for name in ("keys", "values"))
    return TrainedPrefix(IDS, *rows)


@pytest.fixture(scope="module")
def codebook(identity: ModelIdentity) -> Codebook:
    return random_codebook(identity)


def logits(model, codebook: Codebook, windows: torch.Tensor, prefix: TrainedPrefix | None, scope="block", **settings):
    config = AntKVConfig(**{"sinks": False, "prefix": 3, **settings})
    method = Method("x", 1.0, config, VectorQuantiser(codebook), trained_prefix=prefix, anchor_scope=scope)
    with torch.inference_mode(), quantised_past(model, method, windows.shape[1]):
        return model(windows, use_cache=False).logits


@pytest.mark.parametrize("scope", ["block", "prompt"])
def test_windows_with_the_prefix_see_it_and_the_others_are_untouched(model, codebook, windows, own, scope) -> None:
    generator = torch.Generator().manual_seed(1)
    trained = replace(own, k=own.k + torch.randn(own.k.shape, generator=generator))
    plain, with_it = (logits(model, codebook, windows, p, scope=scope) for p in (None, trained))
    assert torch.equal(plain[1:3], with_it[1:3])
    changed = (plain - with_it).abs().amax(-1)
    assert (changed[[0, 3], 2:] > 1e-4).all(), "every query from the last token of the prefix on sees it"
    alone = logits(model, codebook, windows[3:], trained, scope=scope)
    assert torch.allclose(alone, with_it[3:], atol=1e-4)


def test_the_models_own_rows_change_nothing(model, codebook, windows, own) -> None:
    plain, with_it = (logits(model, codebook, windows, prefix) for prefix in (None, own))
    assert torch.allclose(plain, with_it, atol=1e-4)


def test_a_window_shorter_than_the_prefix_is_untouched(model, codebook, windows, own) -> None:
    wrong = replace(own, v=own.v + 1)
    plain, with_it = (logits(model, codebook, windows[:, :2], prefix) for prefix in (None, wrong))
    assert torch.equal(plain, with_it)
