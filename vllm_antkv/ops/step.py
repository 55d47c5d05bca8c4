"""What one engine step computes: which tokens of which requests, and where their pages are. Imports no vLLM."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Step:
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
    query_start_loc_cpu, seq_lens_cpu: in the host's memory; lengths may be upper bounds for requests with a single new
        token or with drafts, as long as their number of new tokens is right. None where nobody says.
    shared: what a layer made of all this in this step, for those behind it.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    vq_block_table: torch.Tensor
    recency_block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    is_prefilling: torch.Tensor | None = None
    query_start_loc_cpu: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    shared: dict[Hashable, Any] = field(init=False, default_factory=dict)

    @property
    def num_reqs(self) -> int:
        """R."""
        return len(self.seq_lens)

    @cached_property
    def min_query_len(self) -> int:
        """Lower bound over the requests that have new tokens, known to the host."""
        if self.query_start_loc_cpu is None or self.max_query_len == 1:
            return 1
        query_lens = self.query_start_loc_cpu.diff()
        present = query_lens[query_lens > 0]
        return int(present.min()) if len(present) else 1
