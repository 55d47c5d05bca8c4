"""The shipped model: it loads, its tokenizer is lossless, it has learnt English, generation is deterministic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL_DIR = Path(__file__).parents[2] / "models" / "embedded"

# The opening of "Pride and Prejudice" (Jane Austen, 1813; public domain).
PASSAGE = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife.\n\nHowever little known the feelings or views of such a man may be on his first entering a neighbourhood, "
    "this truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful "
    'property of some one or other of their daughters.\n\n"My dear Mr. Bennet," said his lady to him one day, "have '
    'you heard that Netherfield Park is let at last?"\n\nMr. Bennet replied that he had not.'
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.bfloat16).eval()


def test_shape_is_what_the_kernels_need(model: Any) -> None:
    config = model.config
    assert config.head_dim == 64
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.max_position_embeddings >= 2048
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert 4e6 < model.num_parameters() < 12e6


def test_weights_are_small_enough_to_ship() -> None:
    assert (MODEL_DIR / "model.safetensors").stat().st_size < 24e6


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200))
def test_any_text_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_special_tokens_are_single_ids(tokenizer: Any) -> None:
    for token in ("<|bos|>", "<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"):
        assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1


def test_chat_template_renders_roles(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": " Good day. "}, {"role": "assistant", "content": "Good day, sir."}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|bos|><|user|>Good day.<|end|><|assistant|>Good day, sir.<|end|>"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|bos|><|user|>Good day.<|end|><|assistant|>"


def test_generation_stops_at_the_end_of_a_turn(tokenizer: Any) -> None:
    stops = json.loads((MODEL_DIR / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")]


@torch.no_grad()
def test_it_has_learnt_english(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(PASSAGE, return_tensors="pt")["input_ids"]
    perplexity = math.exp(model(ids, labels=ids).loss.item())
    assert perplexity < 45  # measured: 32


@torch.no_grad()
def test_greedy_generation_is_deterministic(model: Any, tokenizer: Any) -> None:
    ids = tokenizer("The old man looked at the sea, and", return_tensors="pt")["input_ids"]
    first, second = (model.generate(ids, do_sample=False, max_new_tokens=24) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape[1] > ids.shape[1]
