"""The retrieval model's trainer goes on where it was killed, and its first layer starts by looking back."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

MODELS = Path(__file__).parents[1] / "models"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(MODELS))
    torch.set_num_threads(1)
    return importlib.import_module("train_retrieval")


def new_trainer(script: Any) -> Any:
    config = script.NetConfig(vocab_size=len(script.vocabulary()), hidden_size=64, intermediate_size=64, num_layers=2)
    return script.Trainer(config, script.train_embedded.TrainPlan(minutes=0, steps=40))


def test_a_resumed_run_equals_an_uninterrupted_one(script: Any, tmp_path: Path) -> None:
    whole, broken = new_trainer(script), new_trainer(script)
    for _ in range(4):
        whole.train_step()
    for _ in range(2):
        broken.train_step()
    broken.save(tmp_path / "checkpoint.pt")
    resumed = new_trainer(script)
    resumed.load(tmp_path / "checkpoint.pt")
    for _ in range(2):
        resumed.train_step()
    for mine, theirs in zip(resumed.net.parameters(), whole.net.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_first_layer_starts_by_looking_back(script: Any) -> None:
    """Head h attends to the token h + 1 before, wherever it is."""
    net = new_trainer(script).net
    config, layer = net.config, net.model.layers[0]
    ids, _ = script.Examples().batch(0, 0, 1, 600)
    from embedded_net import rope_tables, rotate

    with torch.no_grad():
        hidden = layer.input_layernorm(net.model.embed_tokens(ids))
        cos, sin = rope_tables(config, ids.shape[1])
        query, key = (
            rotate(proj(hidden).view(1, ids.shape[1], -1, config.head_size), cos, sin)[0]
            for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        )
        key = key.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)
        logits = torch.einsum("qhd,khd->hqk", query, key) / config.head_size**0.5
        weights = logits.masked_fill(~torch.ones(logits.shape[1:]).tril().bool(), -torch.inf).softmax(-1)
    for head in range(config.num_heads):
        assert weights[head].diagonal(-(head + 1)).mean() > 0.9
