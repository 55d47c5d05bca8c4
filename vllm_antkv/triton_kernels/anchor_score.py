"""Anchor Scores (AnTKV, equation 5) of the keys of a block, and the rows that become anchors when the block closes.

Grid (num_tokens // block_size + 2 num_reqs, num_kv_heads): one program for every VQ block that a request's new tokens
touch (see `common.find_request`) has the block's keys in hand and reduces A over the queries, which it rebuilds tile by
tile from exact keys. A is never stored. Not autotuned: a second run would count the votes twice.
"""

import torch
import triton
import triton.language as tl

from .arguments import Batch, Block, ExactRows, Layer, Policy, Request, Rows, Shape
from .choose import choose, key_error, store_keys, store_values, value_error
from .common import (
    LOG2E,
    capped,
    exact_rows,
    find_request,
    first_tile,
    in_recency_page,
    load_exact,
    load_rows,
    mark_missing,
    shares,
    vq_blocks,
)
from .launch import Fixed, launch


def anchor_score(
    rows: Fixed,
    is_sink: torch.Tensor | None,
    prefix: int,
    count: torch.Tensor | None,
    layer: Fixed,
    batch: Fixed,
    shape: Shape,
    policy: Policy,
    scale: float,
    singles: bool,
) -> None:
    """Add the step's votes to the scores of its blocks; choose and store the anchors of those that close.

    Args:
        is_sink: (num_tokens,) bool, tokens that take an anchor row before all others; or None.
        prefix: tokens at the start of a sequence that need no anchor.
        count: () int64, to which the number of anchor rows chosen now, K and V, is added; or None.
        rows, layer, batch: `Rows`, `Layer` and `Batch`.
        scale: multiplies the logits.
        singles: also of requests with one new token, whose votes else come from where they attend.
    """
    num_reqs = batch.argument.seq_lens.shape[0]
    launch(
        _anchor_score_kernel,
        (rows.argument.key.shape[0] // shape.block_size + 2 * num_reqs, shape.num_kv_heads),
        rows,
        batch.argument.seq_lens if is_sink is None else is_sink,
        prefix,
        batch.argument.seq_lens if count is None else count,
        layer,
        batch,
        num_reqs,
        scale,
        shape=shape,
        policy=policy,
        HAS_SINKS=is_sink is not None,
        COUNTS=count is not None,
        SINGLES=singles,
        BLOCK_M=32,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_reqs", "prefix", "scale"])
def _anchor_score_kernel(
    rows: Rows,
    is_sink: tl.tensor,
    prefix: tl.tensor,
    count: tl.tensor,
    layer: Layer,
    batch: Batch,
    num_reqs: tl.tensor,
    scale: tl.tensor,
    shape: tl.constexpr,
    policy: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COUNTS: tl.constexpr,
    SINGLES: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """One (block touched by the step, KV head)."""
    index, head = tl.program_id(0), tl.program_id(1)
    found = find_request(batch.query_start_loc, num_reqs, index, shape.block_size)
    first_row = tl.load(batch.query_start_loc + found)
    num_new = tl.load(batch.query_start_loc + found + 1) - first_row
    end = tl.load(batch.seq_lens + found)
    start = end - num_new
    block = start // shape.block_size + index - first_tile(batch.query_start_loc, found, shape.block_size)
    if (num_new < (1 if SINGLES else 2)) | (block * shape.block_size >= end):
        return
    begin = tl.maximum(block * shape.block_size, start)
    stop = tl.minimum((block + 1) * shape.block_size, end)
    keys = block * shape.block_size + tl.arange(0, shape.block_size)

    request = Request(found, start, first_row, head, rows, batch)
    k_scores, v_scores = carried_scores(keys, keys < begin, begin - 1, request, layer, shape)
    k_rows = exact_rows(0, keys, keys < stop, request, layer, shape)
    mark_missing(k_rows, keys < stop, request, layer)
    first = begin
    # The next step may continue behind any of the last queries. Of one, the compiler sees that there is no loop.
    settled = stop if shape.score_slots == 1 else tl.minimum(tl.maximum(begin + 1, end - shape.score_slots + 1), stop)
    for later in range(1 if shape.score_slots == 1 else stop + 1 - settled):
        upto = settled + later
        k_votes, v_votes = count_votes(k_rows, keys, first, upto, request, scale, layer, shape, BLOCK_M)
        k_scores += k_votes
        v_scores += v_votes
        if HAS_SINKS:
            new = (keys >= first) & (keys < upto)
            sink = tl.load(is_sink + first_row + keys - start, mask=new, other=False)
            k_scores = tl.where(sink, float("inf"), k_scores)
            v_scores = tl.where(sink, float("inf"), v_scores)
        if upto % shape.block_size > 0:
            keep_scores(k_scores, v_scores, keys, keys < upto, upto - 1, request, layer, shape)
        first = upto
    if stop % shape.block_size == 0:
        close_block(k_scores, v_scores, k_rows, keys, request, prefix, count, layer, shape, policy, COUNTS)


@triton.jit
def close_block(
    k_scores: tl.tensor,
    v_scores: tl.tensor,
    k_rows: ExactRows,
    keys: tl.tensor,
    request: Request,
    prefix: tl.tensor,
    count: tl.tensor,
    layer: Layer,
    shape: tl.constexpr,
    policy: tl.constexpr,
    COUNTS: tl.constexpr,
) -> None:
    """Choose and store the anchors of a block from its final scores; keys: the positions of its tokens."""
    origin = tl.min(keys, 0)
    page = tl.load(vq_blocks(request) + origin // shape.block_size).to(tl.int64)
    block = Block(origin, page, request.head)
    v_rows = exact_rows(1, keys, keys >= 0, request, layer, shape)
    k_error = k_scores
    v_error = v_scores
    if policy.anchors:
        k_error = key_error(k_rows, keys - origin, block, layer, shape)
        v_error = value_error(v_rows, keys - origin, block, layer, shape)
    held = choose(k_scores, k_error, 0, keys, prefix, block, count, layer, shape, policy, COUNTS)
    at = origin + held % shape.block_size
    k_held = exact_rows(0, at, held >= 0, request, layer, shape)
    store_keys(k_held, held, block, layer, shape)
    held = choose(v_scores, v_error, 1, keys, prefix, block, count, layer, shape, policy, COUNTS)
    at = origin + held % shape.block_size
    v_held = exact_rows(1, at, held >= 0, request, layer, shape)
    store_values(v_held, held, block, layer, shape)


@triton.jit
def score_pointers(
    keys: tl.tensor, mask: tl.tensor, query: tl.tensor, request: Request, layer: Layer, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Pointers to the K scores that tokens have after the query at position `query`, and which of them own a page.

    Those of V are `page_size` on.
    """
    table = request.batch.recency_table + request.index * request.batch.recency_table_stride
    page = tl.load(table + keys // shape.page_size, mask=mask, other=0).to(tl.int64)
    slot = in_recency_page(layer.scores, page, request.head, layer) + query % shape.score_slots * (2 * shape.page_size)
    return slot + keys % shape.page_size, mask & (page > 0)


@triton.jit
def carried_scores(
    keys: tl.tensor, mask: tl.tensor, query: tl.tensor, request: Request, layer: Layer, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Scores of K and V, (block_size,) float32, that tokens had after the query at position `query`; else 0."""
    pointers, owned = score_pointers(keys, mask, query, request, layer, shape)
    k_scores = tl.load(pointers, mask=owned, other=0.0)
    return k_scores, tl.load(pointers + shape.page_size, mask=owned, other=0.0)


@triton.jit
def keep_scores(
    k_scores: tl.tensor,
    v_scores: tl.tensor,
    keys: tl.tensor,
    mask: tl.tensor,
    query: tl.tensor,
    request: Request,
    layer: Layer,
    shape: tl.constexpr,
) -> None:
    """Write the scores that tokens have after the query at position `query` to the recency pages."""
    pointers, owned = score_pointers(keys, mask, query, request, layer, shape)
    tl.store(pointers, k_scores, mask=owned)
    tl.store(pointers + shape.page_size, v_scores, mask=owned)


@triton.jit
def count_votes(
    k_rows: ExactRows,
    keys: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    request: Request,
    scale: tl.tensor,
    layer: Layer,
    shape: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Votes of the queries `begin .. stop` and all heads of the group on K and V, (block_size,) float32 each:

    AnS(K_j) = sum_i A_ij (1 - A_ij) ||Q_i||,    AnS(V_j) = sum_i A_ij
    """
    TILE: tl.constexpr = BLOCK_M // shape.group_pad if shape.group_pad < BLOCK_M else 1
    channels = tl.arange(0, shape.head_pad)
    in_head = channels < shape.head_size
    key = load_exact(k_rows, channels, in_head)
    row = tl.arange(0, TILE * shape.group_pad)
    heads = request.head * shape.group + row % shape.group_pad
    k_votes = tl.full((shape.block_size,), 0, tl.float32)
    v_votes = tl.full((shape.block_size,), 0, tl.float32)
    for tile in range(begin, stop, TILE):
        positions = tile + row // shape.group_pad
        real = (positions < stop) & (row % shape.group_pad < shape.group)
        tokens = (request.first_row + positions - request.start).to(tl.int64)
        query = load_rows(
            request.rows.query + tokens * request.rows.query_stride + heads * shape.head_size, real, channels, in_head
        )
        logits = tl.dot(query, tl.trans(key), input_precision="tf32x3") * (scale * LOG2E)
        logits = capped(logits, shape)
        visible = real[:, None] & (keys[None, :] <= positions[:, None]) & (keys < stop)[None, :]
        if shape.window > 0:
            visible &= keys[None, :] > positions[:, None] - shape.window
        probs = shares(tl.where(visible, logits, float("-inf")), real, heads, layer, shape)
        wide = query.to(tl.float32)
        norms = tl.sqrt(tl.sum(wide * wide, 1))
        v_votes += tl.sum(probs, 0)
        k_votes += tl.sum(probs * (1.0 - probs) * norms[:, None], 0)
    return k_votes, v_votes
