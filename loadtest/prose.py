"""Random prose with a given number of tokens, so that no two prompts are alike."""

import random

_COMMON = (
    "the of and to in a is that for it was on are with as they be at one have this from by hot word but what some we "
    "can out other were all there when up use your how said an each she which do their time if will way about many "
    "then them write would like so these her long make thing see him two has look more day could go come did number "
    "sound no most people my over know water than call first who may down side been now find any new work part take "
    "get place made live where after back little only round man year came show every good me give our under name very "
    "through just form sentence great think say help low line differ turn cause much mean before move right boy old "
    "too same tell does set three want air well also play small end put home read hand port large spell add even land"
)
_WORDS = _COMMON.split()
_SENTENCE = 12


class Prose:
    """Writes prose with a tokenizer's measured number of tokens per word."""

    def __init__(self, tokens_per_word: float) -> None:
        self.tokens_per_word = tokens_per_word

    def write(self, tokens: float, rng: random.Random) -> str:
        """About `tokens` tokens, never fewer than one word."""
        return words(max(1, int(tokens / self.tokens_per_word)), rng)


def words(count: int, rng: random.Random) -> str:
    """Sentences of 12 words, `count` words in all."""
    picked = rng.choices(_WORDS, k=count)
    sentences = (" ".join(picked[i : i + _SENTENCE]).capitalize() for i in range(0, count, _SENTENCE))
    return ". ".join(sentences) + "."
