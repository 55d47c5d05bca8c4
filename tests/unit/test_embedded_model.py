"""The shipped model: its tokenizer is lossless, it has a chat template, and it has learnt English."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.places import EMBEDDED

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
    return AutoTokenizer.from_pretrained(EMBEDDED)


@given(text=st.text(max_size=200))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_chat_template_renders_roles(tokenizer):
    messages = [{"role": "user", "content": " Good day. "}, {"role": "assistant", "content": "Good day, sir."}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|bos|><|user|>Good day.<|end|><|assistant|>Good day, sir.<|end|>"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|bos|><|user|>Good day.<|end|><|assistant|>"


@torch.no_grad()
def test_it_has_learnt_english(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.bfloat16).eval()
    ids = tokenizer(PASSAGE, return_tensors="pt")["input_ids"]
    perplexity = math.exp(model(ids, labels=ids).loss.item())
    assert perplexity < 45  # measured: 32
