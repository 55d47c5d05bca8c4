"""Which rows a method of the literature keeps exact, by position alone; K and V each by a table of their own.

The tables are those of `select.recency`: entry `j` is the last query position that sees row `j` exactly, at least `j`.
Rows are stored in full precision or as codes, never as both.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_antkv.config import AntKVConfig
from vllm_antkv.select.recency import ALWAYS, last_query_table

#: num_tokens -> (num_tokens,) integer, the last query that sees each row exactly.
Table = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Retention:
    """What stays exact.

    key, value: the last query of each K row and of each V row.
    first: first tokens that stay exact for good.
    learn: a quantiser that learns from the first `learn` tokens of the sequence leaves them exact until it has them.
    """

    key: Table
    value: Table
    first: int = 0
    learn: int = 0

    def tables(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of K and of V, each (num_tokens,) int64."""
        return self._table(self.key, num_tokens), self._table(self.value, num_tokens)

    def _table(self, table: Table, num_tokens: int) -> torch.Tensor:
        last = table(num_tokens).long()
        last[: self.learn] = last[: self.learn].clamp(min=self.learn - 1)
        last[: self.first] = ALWAYS
        return last


def sliding(window: int) -> Table:
    """The last `window` tokens; 1 leaves a token exact for itself alone."""
    return lambda num_tokens: torch.arange(num_tokens) + (window - 1)


def until_group_closes(size: int) -> Table:
    """Tokens whose group of `size` tokens is not complete yet."""
    return lambda num_tokens: torch.arange(num_tokens) // size * size + (size - 1)


def shared(config: AntKVConfig) -> Table:
    """The recency that all methods of a comparison share, without any method's intact prefix."""
    return lambda num_tokens: last_query_table(config.model_copy(update={"prefix": 0}), num_tokens)


def later_of(first: Table, second: Table) -> Table:
    """Exact as long as either says so."""
    return lambda num_tokens: torch.maximum(first(num_tokens), second(num_tokens))
