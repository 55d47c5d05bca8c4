"""What one engine step computes: which tokens of which requests, and where their pages are. Imports no vLLM.

It is planned once, on the host, before any layer runs; layers only launch.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.c_structs import HEADER, fields
from vllm_antkv.ops.varlen_call import PrefillRound, VarlenCall

if TYPE_CHECKING:
    from vllm_antkv.triton_kernels.launch import Fixed


class StepArgument(ctypes.Structure):
    """antkv_step of csrc/cpu/antkv.h, Step of csrc/cuda/layer.cuh."""

    _fields_: ClassVar = fields(HEADER, "antkv_step")


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A step of R requests, with the new tokens of each side by side.

    query_start_loc: (R + 1,) int32, prefix sums of the requests' numbers of new tokens.
    seq_lens: (R,) int32 sequence lengths, new tokens included.
    vq_block_table: (R, max_blocks) int32, blocks of the VQ pages.
    recency_block_table: (R, max_pages) int32, blocks of the recency pages. 0 is the null block. Ids of pages that were
        freed stay in the table, so it does not say which rows can be read: positions do.
    max_query_len, max_seq_len: upper bounds over the requests, known to the host.
    is_prefilling: (R,) bool in the host's memory, requests whose new tokens are of their prompts. Kernels that add up
        in another order for single queries do so behind a prompt only: its results must not depend on how it is cut.
        None where nobody says.
    query_start_loc_cpu: in the host's memory. None where nobody says.
    rounds: how `ops.varlen` attends from the requests that do not decode: none where they have no past; None where
        nobody has planned that.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    vq_block_table: torch.Tensor
    recency_block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    is_prefilling: torch.Tensor | None = None
    query_start_loc_cpu: torch.Tensor | None = None
    rounds: tuple[PrefillRound, ...] | None = None

    @cached_property
    def num_reqs(self) -> int:
        """R."""
        return self.seq_lens.shape[0]

    @cached_property
    def min_query_len(self) -> int:
        """Lower bound over the requests that have new tokens, known to the host."""
        if self.query_start_loc_cpu is None or self.max_query_len == 1:
            return 1
        query_lens = self.query_start_loc_cpu.diff()
        present = query_lens[query_lens > 0]
        return int(present.min()) if len(present) else 1

    @cached_property
    def in_hand(self) -> VarlenCall:
        """Every request attends to its new tokens alone."""
        return VarlenCall(self.query_start_loc, None, self.max_query_len, self.max_query_len, causal=True)

    @cached_property
    def batch(self) -> "Fixed":
        """What Triton's kernels, which are imported only where they run, are handed: `arguments.Batch`."""
        from vllm_antkv.triton_kernels.arguments import Batch
        from vllm_antkv.triton_kernels.launch import Fixed

        return Fixed(
            Batch(
                query_start_loc=self.query_start_loc,
                seq_lens=self.seq_lens,
                vq_table=self.vq_block_table,
                vq_table_stride=self.vq_block_table.stride(0),
                recency_table=self.recency_block_table,
                recency_table_stride=self.recency_block_table.stride(0),
            )
        )

    @cached_property
    def argument(self) -> StepArgument:
        """What C++ and CUDA are handed of it."""
        return StepArgument(
            self.query_start_loc.data_ptr(),
            self.seq_lens.data_ptr(),
            self.vq_block_table.data_ptr(),
            self.recency_block_table.data_ptr(),
            self.vq_block_table.stride(0),
            self.recency_block_table.stride(0),
            self.num_reqs,
        )


@dataclass(frozen=True, eq=False)
class StepRequest:
    """A request's part of a step: tokens `start .. end` of its sequence are rows `first ...` of the step's tensors.

    row: its place in the step.
    is_prefilling: the tokens are of its prompt.
    vq_blocks, recency_blocks: of the block tables.
    """

    row: int
    first: int
    start: int
    end: int
    is_prefilling: bool
    vq_blocks: torch.Tensor
    recency_blocks: torch.Tensor

    def rows(self, begin: int, end: int) -> slice:
        """Rows of tokens `begin .. end`, which are in hand."""
        return slice(self.first + begin - self.start, self.first + end - self.start)

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """`(block, begin, end)` of the runs of new tokens that lie in one VQ block."""
        for block in range(self.start // VQ_BLOCK_SIZE, -(-self.end // VQ_BLOCK_SIZE)):
            first = block * VQ_BLOCK_SIZE
            yield block, max(first, self.start), min(first + VQ_BLOCK_SIZE, self.end)


def step_requests(step: StepPlan) -> Iterator[StepRequest]:
    """Those of a step that have new tokens."""
    starts = step.query_start_loc.tolist()
    for row, end in enumerate(step.seq_lens.tolist()):
        num_new = starts[row + 1] - starts[row]
        if num_new:
            prefilling = step.is_prefilling is not None and bool(step.is_prefilling[row])
            tables = step.vq_block_table[row], step.recency_block_table[row]
            yield StepRequest(row, starts[row], end - num_new, end, prefilling, *tables)
