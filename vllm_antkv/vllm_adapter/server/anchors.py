"""The answer of `GET /antkv/anchors`: which tokens of one of the last prompts are anchors, by layer and KV head.

Each engine numbers its prompts; request ids are not shown, and no text unless the setting `dashboard_text` allows it.
"""

from collections.abc import Callable
from typing import Any, Self

from pydantic import BaseModel, Field

from vllm_antkv.config import VQ_BLOCK_SIZE

#: Token positions by layer and KV head.
Positions = list[list[list[int]]]
#: Text of token ids.
Decode = Callable[[list[int]], str]


class Prompt(BaseModel, frozen=True):
    """One of the last prompts whose pages can still be read."""

    engine: int
    prompt: int = Field(description="Counted from 1 by its engine.")
    tokens: int = Field(description="In full blocks, those of the answer included.")
    running: bool


class AnchorMap(BaseModel, frozen=True):
    """Anchors among the tokens `first_token .. first_token + tokens` of a prompt."""

    engine: int
    prompt: int
    first_token: int
    tokens: int
    k: Positions = Field(description="Tokens whose K row is an anchor, by layer and KV head.")
    v: Positions = Field(description="Tokens whose V row is an anchor, by layer and KV head.")
    text: list[str] | None = Field(description="Of each token; null unless the setting `dashboard_text` is true.")

    @classmethod
    def of(cls, engine: int, answer: dict[str, Any], num_kv_heads: int, decode: Decode) -> Self:
        """Read the `map` of an engine's `antkv_anchors`."""
        first_token = answer["first_block"] * VQ_BLOCK_SIZE
        token_ids = answer["token_ids"]
        k, v = (_positions(answer["workers"], kind, first_token, num_kv_heads) for kind in range(2))
        return cls(
            engine=engine,
            prompt=answer["prompt"],
            first_token=first_token,
            tokens=answer["blocks"] * VQ_BLOCK_SIZE,
            k=k,
            v=v,
            text=None if token_ids is None else [decode([token_id]) for token_id in token_ids],
        )


class Anchors(BaseModel, frozen=True):
    """The last prompts, newest first, and the map of one of them; null when its pages are gone."""

    prompts: list[Prompt]
    map: AnchorMap | None

    @classmethod
    def of(
        cls,
        answers: dict[int, dict[str, Any]],
        engine: int | None,
        num_kv_heads: int,
        decode: Callable[[list[int]], str],
    ) -> Self:
        """Read the engines' answers to `antkv_anchors`; without `engine`, show the first map there is."""
        maps = {rank: answer["map"] for rank, answer in answers.items() if answer["map"] and engine in (None, rank)}
        rank = min(maps, default=None)
        return cls(
            prompts=[
                Prompt(
                    engine=rank, prompt=each["prompt"], tokens=each["blocks"] * VQ_BLOCK_SIZE, running=each["running"]
                )
                for rank, answer in answers.items()
                for each in answer["prompts"]
            ],
            map=None if rank is None else AnchorMap.of(rank, maps[rank], num_kv_heads, decode),
        )


def _positions(workers: list[Any], kind: int, first_token: int, num_kv_heads: int) -> Positions:
    """Anchors of K (`kind` 0) or V (1) from the workers' offsets: [worker][layer][block][head][kind][row]."""
    layers = []
    for layer in range(len(workers[0])):
        heads = [_of_head(worker[layer], head, kind, first_token) for worker in workers for head in _heads(worker)]
        # With more tensor-parallel workers than KV heads, neighbouring workers have the same head.
        layers.append(heads[:: len(heads) // num_kv_heads])
    return layers


def _heads(worker: Any) -> range:
    return range(len(worker[0][0]))


def _of_head(blocks: Any, head: int, kind: int, first_token: int) -> list[int]:
    return [
        first_token + block * VQ_BLOCK_SIZE + offset
        for block, heads in enumerate(blocks)
        for offset in sorted(heads[head][kind])
        if offset >= 0
    ]
