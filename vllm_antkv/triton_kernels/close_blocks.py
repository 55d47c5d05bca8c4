"""Anchors of the blocks that single tokens fill, where the votes on them were counted by other kernels.

Grid (num_reqs, num_kv_heads): a block closes once in 128 steps of a request, and most programs end at once.
"""

import torch
import triton
import triton.language as tl

from .anchor_score import carried_scores, close_block
from .arguments import Batch, Layer, Policy, Request, Rows, Shape
from .common import exact_rows, mark_missing
from .launch import Fixed, launch


def close_blocks(
    rows: Fixed, prefix: int, count: torch.Tensor | None, layer: Fixed, batch: Fixed, shape: Shape, policy: Policy
) -> None:
    """Choose and store the anchors of blocks whose last token is the only one that its request computes.

    All arguments as of `anchor_score`; the scores in the pages are final.
    """
    launch(
        _close_blocks_kernel,
        (batch.argument.seq_lens.shape[0], shape.num_kv_heads),
        rows,
        prefix,
        batch.argument.seq_lens if count is None else count,
        layer,
        batch,
        shape=shape,
        policy=policy,
        COUNTS=count is not None,
        num_warps=16,
    )


@triton.jit(do_not_specialize=["prefix"])
def _close_blocks_kernel(
    rows: Rows,
    prefix: tl.tensor,
    count: tl.tensor,
    layer: Layer,
    batch: Batch,
    shape: tl.constexpr,
    policy: tl.constexpr,
    COUNTS: tl.constexpr,
) -> None:
    """A request and a KV head."""
    index, head = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(batch.query_start_loc + index)
    num_new = tl.load(batch.query_start_loc + index + 1) - first_row
    end = tl.load(batch.seq_lens + index)
    if (num_new != 1) | (end % shape.block_size != 0):
        return
    keys = end - shape.block_size + tl.arange(0, shape.block_size)
    request = Request(index, end - 1, first_row, head, rows, batch)
    k_scores, v_scores = carried_scores(keys, keys >= 0, end - 1, request, layer, shape)
    k_rows = exact_rows(0, keys, keys >= 0, request, layer, shape)
    mark_missing(k_rows, keys >= 0, request, layer)
    close_block(k_scores, v_scores, k_rows, keys, request, prefix, count, layer, shape, policy, COUNTS)
