"""The retrieval model: its trainer goes on where it was killed, and what it learned is what the prompts ask."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.evaluate.retrieval import answers_right
from vllm_antkv.evaluate.retrieval_prompts import KINDS, make_prompts
from vllm_antkv.laboratory.base import MethodRequest
from vllm_antkv.offline.models import ModelCard

MODELS = Path(__file__).parents[2] / "models"
RETRIEVAL = MODELS / "retrieval"


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


def test_the_tokenizer_reads_every_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(RETRIEVAL)
    for prompt in make_prompts(tokenizer, list(KINDS), [256], [0.0, 0.5, 1.0], 5):
        ids = [*prompt.prompt, *prompt.answer]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids).endswith(prompt.expected)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return ModelCard.read(str(RETRIEVAL))


def share_right(card: ModelCard, name: str, config: AntKVConfig, depths: list[float], length: int = 1024) -> float:
    prompts = make_prompts(card.tokenizer, ["pairs"], [length], depths, 8)
    method = build_method(name, MethodRequest(card.name, card.identity, None, config))
    right = answers_right(card.load(), method, prompts)
    return sum(right) / len(right)


def test_one_bit_tells_keys_apart_beyond_recency(card: ModelCard) -> None:
    """With interleaved channels, in the shipped codebooks; with neighbouring ones half of the answers are wrong."""
    middle = [0.25, 0.5, 0.75]
    right = {name: share_right(card, name, AntKVConfig(), middle) for name in ("fp16", "antkv-2bit", "antkv-1bit")}
    assert right["fp16"] >= 0.9
    assert right["antkv-2bit"] >= right["fp16"] - 0.1
    assert right["antkv-1bit"] >= right["fp16"] - 0.2
