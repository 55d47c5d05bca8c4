"""What the retrieval model learned is what the prompts ask."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from research.retrieval.answers import answers_right
from research.retrieval.prompts import KINDS, make_prompts
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.offline.models import ModelCard

RETRIEVAL = Path(__file__).parents[1] / "models" / "retrieval"


def test_the_tokenizer_reads_every_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(RETRIEVAL)
    kinds = [kind for kind in KINDS if kind != "chat"]  # the model has no chat format
    for prompt in make_prompts(tokenizer, kinds, [256], [0.0, 0.5, 1.0], 5):
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
