"""The engine flags tokens with massive activations, wherever they are, and keeps their K and V as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.places import PRESET
from tests.serving.served_family import assert_as_expected, calibrate, expected_logprobs
from tests.serving.tiny import make_model

#: BOS, and " as", once in 214 tokens of the text that the codebook is learned from.
PLANTED = [0, 345]
SETTINGS: dict[str, Any] = {"recency": "none", "prefix": 0, "anchor_share": 0.0}
#: Sinks in the first block and in the second, behind which a query sees codes.
PROMPTS = [[0, *range(400, 460), 345, *range(500, 600), 345, *range(700, 720 + i)] for i in (1, 90)]


@pytest.fixture
def model(tmp_path) -> Path:
    """From its first layer on the residual stream carries 5000 in one channel of some tokens."""
    folder = make_model(tmp_path / "model", "llama", {"initializer_range": 0.2})
    planted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        planted.get_input_embeddings().weight[PLANTED, 11] = 5000.0
    planted.save_pretrained(folder)
    calibrate(folder, PRESET, folder / "antkv")
    return folder


def test_the_engine_flags_and_keeps_planted_sinks(start_engine, model):
    with start_engine(model, PRESET, SETTINGS, max_model_len=512, enable_prefix_caching=False) as engine:
        impls = [layer.impl for layer in engine.layers.values() if hasattr(layer, "impl")]
        (flags,) = {impl.attachment.sinks for impl in impls} - {None}
        served = []
        for prompt in PROMPTS:
            # One token: the prompt is the only step, and its flags are still there afterwards.
            served += engine.complete([prompt], max_tokens=1)
            is_planted = torch.isin(torch.tensor(prompt), torch.tensor(PLANTED))
            assert torch.equal(flags.of_step(len(prompt)).cpu(), is_planted)
    assert_as_expected(served, expected_logprobs(model, PRESET, prompts=PROMPTS, **SETTINGS))
    with pytest.raises(AssertionError):
        assert_as_expected(served, expected_logprobs(model, PRESET, prompts=PROMPTS, **SETTINGS, sinks=False))
