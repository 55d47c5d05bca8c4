"""A kernel for plain rows in pages, and one call of it: what FlashAttention does, without its name. Imports no vLLM."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """Runs of queries, side by side, and the rows of pages that each attends to; tensors are on the device.

    starts: (num_runs + 1,) int32, prefix sums of the runs' numbers of queries.
    num_keys: (num_runs,) int32, rows from the first page of a run on; 0 where it sees nothing.
    pages: (num_runs, max_pages) int32, those of each run, in order.
    max_rows, max_keys: the most of a run.
    causal: the last query of a run sees all its keys, the one before it one less; else all see all.
    window: keys that a query sees at most, the last one included; None is all.
    """

    starts: torch.Tensor
    num_keys: torch.Tensor
    pages: torch.Tensor
    max_rows: int
    max_keys: int
    causal: bool
    window: int | None


@dataclass(frozen=True)
class Varlen:
    """The kernel, handed in where there is one.

    attend: takes query (n, num_heads, head_size), pages of K and of V (num_pages, page_size, num_kv_heads, head_size),
        the output (n, num_heads, head_size), which it writes, the call and the scale of the logits; all rows in the
        model's dtype. Returns the log-sum-exp of the scaled logits, (num_heads, n) float32: infinite, of either sign,
        and the output 0 for a query that sees nothing.
    max_num_tokens: the most rows of a step.
    max_head_size: the most channels of a row.
    """

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, VarlenCall, float], torch.Tensor]
    max_num_tokens: int
    max_head_size: int
