"""Prompts say what they claim to say: a fact once, at its depth, in as many tokens as asked for."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from research.retrieval.prompts import KINDS, make_prompts
from tests.conftest import Refused
from vllm_antkv.errors import SettingsError

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "embedded")
#: Tokens of the longest line of any kind.
LINE = 40
depths = st.floats(0, 1)
lengths = st.integers(100, 1500)


def one(kind: str, length: int, depth: float, seed: int = 0):
    (prompt,) = make_prompts(TOKENIZER, [kind], [length], [depth], 1, seed)
    return prompt, TOKENIZER.decode(prompt.prompt[1:])


@settings(max_examples=20)
@given(kind=st.sampled_from(sorted(KINDS)), length=lengths, depth=depths)
def test_it_is_as_long_as_asked_for(kind: str, length: int, depth: float) -> None:
    prompt, text = one(kind, length, depth)
    assert length - LINE <= len(prompt.prompt) + len(prompt.answer) <= length
    assert prompt.prompt[0] == TOKENIZER.bos_token_id
    whole = (text + TOKENIZER.decode(prompt.answer)).rstrip()
    assert whole.endswith(prompt.expected)
    assert list(prompt.prompt[1:]) == TOKENIZER(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=20)
@given(length=lengths, depth=depths)
def test_pairs_answer_their_question_at_their_depth(length: int, depth: float) -> None:
    prompt, text = one("pairs", length, depth)
    *lines, question = text.split("\n")
    keys = [line.split(":")[0] for line in lines]
    assert len(set(keys)) == len(keys), "no key twice"
    assert dict(line.split(":") for line in lines)[question.rstrip(":")] == prompt.expected
    assert keys.index(question.rstrip(":")) == round(depth * (len(keys) - 1))


@settings(max_examples=20)
@given(length=lengths, depth=depths)
def test_the_passkey_is_told_once_at_its_depth(length: int, depth: float) -> None:
    prompt, text = one("passkey", length, depth)
    *lines, question = text.split("\n")
    told = [at for at, line in enumerate(lines) if line == f"The pass key is {prompt.expected}. Remember it."]
    assert told == [round(depth * (len(lines) - 1))]
    assert question.rstrip() == "The pass key is"
    assert text.count(prompt.expected) == 1


def test_a_chat_has_the_passkey_in_a_message_and_begins_its_answer() -> None:
    prompt, text = one("chat", 300, 0.5)
    user, answer = text.split("<|end|>")
    assert user.startswith("<|user|>The grass is green.")
    assert f"The pass key is {prompt.expected}. Remember it." in user
    assert user.endswith("What is the pass key?")
    # The space is a token of its own, for which "a" or "the" may be as likely.
    assert answer == "<|assistant|>The pass key is "


def test_a_chat_needs_a_format(refused: Refused) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER.name_or_path)
    tokenizer.chat_template = None
    with refused(SettingsError, "passkey"):
        make_prompts(tokenizer, ["chat"], [300], [0.5], 1)


def test_the_seed_decides_everything() -> None:
    def prompts(seed: int):
        return make_prompts(TOKENIZER, list(KINDS), [100, 200], [0.0, 1.0], 3, seed)

    first = prompts(0)
    assert first == prompts(0)
    assert len({prompt.prompt for prompt in first}) == len(first) == len(KINDS) * 2 * 2 * 3
    assert not {prompt.prompt for prompt in first} & {prompt.prompt for prompt in prompts(1)}


@pytest.mark.parametrize(
    "kinds, lengths, depths",
    [(["haystack"], [100], [0.5]), (["pairs"], [100], [1.5]), (["passkey"], [12], [0.5])],
)
def test_mistakes(kinds: list[str], lengths: list[int], depths: list[float], refused: Refused) -> None:
    with refused(SettingsError):
        make_prompts(TOKENIZER, kinds, lengths, depths, 1)
