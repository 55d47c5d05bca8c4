"""Anchors of the blocks that single tokens fill, where the votes on them were counted by other kernels.

Grid (num_reqs / 32, num_kv_heads): a program looks at 32 requests at once, of which a block closes once in 128 steps.
"""

import torch
import triton
import triton.language as tl

from .anchor_score import carried_scores, close_block
from .arguments import Batch, Pages, Policy, Request, Rows, Shape, Tables
from .common import exact_rows

_TOGETHER = 32


def close_blocks(
    rows: Rows,
    prefix: int,
    count: torch.Tensor | None,
    pages: Pages,
    tables: Tables,
    batch: Batch,
    shape: Shape,
    policy: Policy,
) -> None:
    """Choose and store the anchors of blocks whose last token is the only one that its request computes.

    All arguments as of `anchor_score`; the scores in the pages are final.
    """
    num_reqs = batch.seq_lens.shape[0]
    _close_blocks_kernel[(triton.cdiv(num_reqs, _TOGETHER), shape.num_kv_heads)](
        rows,
        prefix,
        batch.seq_lens if count is None else count,
        pages,
        tables,
        batch,
        num_reqs,
        shape,
        policy,
        COUNTS=count is not None,
        TOGETHER=_TOGETHER,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_reqs", "prefix"])
def _close_blocks_kernel(
    rows: Rows,
    prefix: tl.tensor,
    count: tl.tensor,
    pages: Pages,
    tables: Tables,
    batch: Batch,
    num_reqs: tl.tensor,
    shape: tl.constexpr,
    policy: tl.constexpr,
    COUNTS: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Some requests and one KV head."""
    first, head = tl.program_id(0) * TOGETHER, tl.program_id(1)
    requests = first + tl.arange(0, TOGETHER)
    there = requests < num_reqs
    starts = tl.load(batch.query_start_loc + requests, mask=there, other=0)
    stops = tl.load(batch.query_start_loc + requests + 1, mask=there, other=0)
    ends = tl.load(batch.seq_lens + requests, mask=there, other=1)
    closes = (stops - starts == 1) & (ends % shape.block_size == 0)
    if tl.sum(closes.to(tl.int32), 0) == 0:
        return
    for index in range(first, tl.minimum(first + TOGETHER, num_reqs)):
        first_row = tl.load(batch.query_start_loc + index)
        num_new = tl.load(batch.query_start_loc + index + 1) - first_row
        end = tl.load(batch.seq_lens + index)
        if (num_new == 1) & (end % shape.block_size == 0):
            keys = end - shape.block_size + tl.arange(0, shape.block_size)
            request = Request(index, end - 1, first_row, head)
            k_scores, v_scores = carried_scores(keys, keys >= 0, end - 1, request, pages, batch, shape)
            k_rows = exact_rows(
                pages.recent_k, rows.key, rows.key_stride, keys, keys >= 0, request, pages, batch, shape
            )
            close_block(
                k_scores, v_scores, k_rows, keys, request, prefix, count, rows, pages, tables, batch, shape, policy,
                COUNTS,
            )  # fmt: skip
