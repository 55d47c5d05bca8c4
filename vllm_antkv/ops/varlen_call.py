"""A kernel for plain rows, and one call of it: what FlashAttention does, without its name. Imports no vLLM."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm_antkv.triton_kernels.launch import Fixed


class RowsInPages(NamedTuple):
    """Which rows runs of queries attend to; tensors are on the device.

    num_keys: (num_runs,) int32, rows from the first page of a run on; 0 where it sees nothing.
    page_table: (num_runs, max_pages) int32, the pages of each run, in order.
    """

    num_keys: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """Runs of queries, side by side, and the rows that each attends to; tensors are on the device.

    starts: (num_runs + 1,) int32, prefix sums of the runs' numbers of queries.
    keys: None: rows in hand, as many for each run as it has queries.
    max_rows, max_keys: the most of a run.
    causal: the last query of a run sees all its keys, the one before it one less; else all see all.
    """

    starts: torch.Tensor
    keys: RowsInPages | None
    max_rows: int
    max_keys: int
    causal: bool


@dataclass(frozen=True, eq=False)
class StepPages:
    """Pages of plain rows that a step needs.

    requests: (num_pages, 2) int32 on the device: request and VQ block.
    """

    requests: torch.Tensor

    @cached_property
    def handed(self) -> "Fixed":
        """What Triton's kernels are handed."""
        # Triton is imported only where it runs.
        from vllm_antkv.triton_kernels.launch import Fixed

        return Fixed(self.requests)


@dataclass(frozen=True, eq=False)
class PrefillRound:
    """`varlen_plan.Round`, with what the device reads there."""

    first_row: int
    num_rows: int
    is_first: bool
    pages: StepPages
    call: VarlenCall


@dataclass(frozen=True)
class Varlen:
    """The kernel, handed in where there is one.

    attend: takes query (n, num_heads, head_size); K and V, (n, num_kv_heads, head_size) in hand or pages
        (num_pages, page_size, num_kv_heads, head_size); the output (n, num_heads, head_size), which it writes; the call
        and the scale of the logits; all rows in the model's dtype. Returns the log-sum-exp of the scaled logits,
        (num_heads, n) float32: infinite, of either sign, and the output 0 for a query that sees nothing.
    max_num_tokens: the most rows of a step.
    max_head_size: the most channels of a row.
    narrow_values: V, and the output, may have the channels of a head where queries and K have `BIAS_CHANNELS` more.
    """

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, VarlenCall, float], torch.Tensor]
    max_num_tokens: int
    max_head_size: int
    narrow_values: bool = False
