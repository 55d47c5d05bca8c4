"""The shipped model: its tokenizer is lossless, and it has a chat template."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.places import EMBEDDED


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
