"""Synthetic retrieval prompts: a fact at a known depth of a text of known length, and the question for it.

Two kinds that a model completes without instructions, and one for models that chat:

* `pairs`: every line is a key and its value, and one of the keys is asked for. All lines look alike, so that the row of
  one key must still be told from those of all the others.
* `passkey`: one line of a repeated text tells a number (Mohtashami and Jaggi, Landmark Attention, appendix).
* `chat`: the same as a message in the model's own chat format, whose answer is begun.

The same seed gives the same prompts for every method, so that answers compare one by one.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from vllm_antkv.errors import SettingsError

HAYSTACK = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_PASSKEY = "The pass key is"


@dataclass(frozen=True)
class RetrievalPrompt:
    """One question.

    kind: of `KINDS`.
    length: tokens asked for; question and answer have as many or a few less.
    depth: where the fact is, from 0 (first line) to 1 (last line).
    prompt: token ids of BOS, text and question, and of the space before the answer where that is a token.
    answer: token ids of the answer that follows.
    expected: the digits of the answer.
    """

    kind: str
    length: int
    depth: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    expected: str


def number(rng: random.Random) -> str:
    """Four digits."""
    return str(rng.randrange(1000, 10000))


def pair_lines(rng: random.Random, count: int) -> list[str]:
    """Lines `key:value`, no key twice."""
    return [f"{key}:{number(rng)}\n" for key in rng.sample(range(1000, 10000), count)]


def _pairs(rng: random.Random, num_lines: int, target: int) -> tuple[str, str]:
    lines = pair_lines(rng, num_lines)
    key, value = lines[target].strip().split(":")
    return "".join(lines) + f"{key}:", value


def passkey_text(rng: random.Random, num_lines: int, target: int) -> tuple[str, str]:
    """Text of `num_lines` lines with its question, and the number that answers it, preceded by a space."""
    value = number(rng)
    lines = [HAYSTACK] * num_lines
    lines[target] = f"{_PASSKEY} {value}. Remember it.\n"
    return "".join(lines) + _PASSKEY, f" {value}"


#: Kind -> what writes the text with its question, and the answer, given how many lines there are and which tells it.
KINDS: dict[str, Callable[[random.Random, int, int], tuple[str, str]]] = {
    "pairs": _pairs,
    "passkey": passkey_text,
    "chat": passkey_text,
}


def make_prompts(
    tokenizer: PreTrainedTokenizerBase,
    kinds: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    count: int,
    seed: int = 0,
) -> list[RetrievalPrompt]:
    """`count` prompts for every kind, length and depth.

    Raises SettingsError for an unknown kind, a depth outside 0 to 1, or a length too short to hold a fact and its
    question.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise SettingsError(f"Unknown kind of retrieval '{kind}': choose among {', '.join(KINDS)}.")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise SettingsError(f"A depth is {depth:g}, but must be between 0 (first line) and 1 (last line).")
    return [
        _make_prompt(tokenizer, kind, length, depth, f"{seed}/{kind}/{length}/{depth}/{index}")
        for kind in kinds
        for length in lengths
        for depth in depths
        for index in range(count)
    ]


def _make_prompt(
    tokenizer: PreTrainedTokenizerBase, kind: str, length: int, depth: float, seed: str
) -> RetrievalPrompt:
    if kind == "chat" and tokenizer.chat_template is None:
        raise SettingsError("This model's tokenizer has no chat format: use passkey in the place of chat.")
    per_line = _num_tokens(tokenizer, kind, 33) - _num_tokens(tokenizer, kind, 1)
    num_lines = max(1, 32 * length // per_line)
    while num_lines > 0:
        text, answer = KINDS[kind](random.Random(seed), num_lines, round(depth * (num_lines - 1)))
        if kind == "chat":
            text = _as_chat(tokenizer, text)
        prompt, whole = _encode(tokenizer, text), _encode(tokenizer, text + answer)
        if whole[: len(prompt)] != prompt:
            raise SettingsError(
                f"This tokenizer joins the question and its answer in one token, so '{kind}' cannot be scored with it."
            )
        if len(whole) <= length:
            begun = len(prompt)
            # Some tokenizers make the space before a number a token, for which a model has other likely words.
            while not tokenizer.decode(whole[begun]).strip():
                begun += 1
            return RetrievalPrompt(kind, length, depth, whole[:begun], whole[begun:], answer.strip())
        num_lines -= max(1, math.floor((len(whole) - length) * 32 / per_line))
    raise SettingsError(f"A length of {length} tokens is too short for a '{kind}' prompt: use longer --lengths.")


def _num_tokens(tokenizer: PreTrainedTokenizerBase, kind: str, num_lines: int) -> int:
    text, _ = KINDS[kind](random.Random(0), num_lines, 0)
    return len(_encode(tokenizer, text))


def _as_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A passkey's text as a conversation whose last turn, the model's, has begun."""
    messages = [{"role": "user", "content": f"{text.removesuffix(_PASSKEY)}\nWhat is the pass key?"}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)) + _PASSKEY


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids, BOS first where the tokenizer has one; chat formats may write it themselves."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = [] if tokenizer.bos_token_id in (None, *ids[:1]) else [tokenizer.bos_token_id]
    return (*bos, *ids)
