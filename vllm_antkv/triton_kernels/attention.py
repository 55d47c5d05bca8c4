"""Attention of a tile of queries to a range of keys, coded or exact: what decode and prefill share.

The queries of a tile are at positions of one VQ block; so whether the anchors of a block of keys serve them is one
question for the tile. Online softmax in powers of two.
"""

import triton
import triton.language as tl

from .arguments import Block, Layer, Queries, Request, Rows, Softmax
from .codes import head_centroids, load_key_codes, load_value_codes, look_up_key_halves, look_up_values
from .common import (
    ALWAYS,
    LOG2E,
    capped,
    channels_of_pairs,
    exact_rows,
    from_e4m3,
    in_vq_page,
    load_exact,
    load_halves,
    load_rows,
    mark_missing,
    rotate,
    vq_block,
)


@triton.jit
def query_pointers(rows: Rows, tokens: tl.tensor, heads: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """(M,) where the queries of `tokens` and `heads` (M,) each start."""
    return rows.query + tokens.to(tl.int64) * rows.query_stride + heads * shape.head_size


@triton.jit
def coded_bias(at: tl.tensor, heads: tl.tensor, real: tl.tensor, weights: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """(M,) float32, what is added to logits of coded keys: see `ops.reference.jensen_bias`.

    at, heads, real: (M,) pointers to queries, their heads, and which of them there are.
    weights: `Layer.jensen_weights`.
    """
    if not shape.has_jensen:
        return tl.full((at.shape[0],), 0, tl.float32)
    channels = tl.arange(0, shape.head_pad)
    in_head = channels < shape.head_size
    query = load_rows(at, real, channels, in_head).to(tl.float32)
    factors = load_rows(weights + heads * shape.head_size, real, channels, in_head)
    return tl.sum(query * query * factors, 1)


@triton.jit
def nothing_seen(row: tl.tensor, shape: tl.constexpr) -> Softmax:
    """Where the online softmax of M rows of queries starts."""
    maximum = tl.full((row.shape[0],), float("-inf"), tl.float32)
    total = tl.full((row.shape[0],), 0, tl.float32)
    return Softmax(maximum, total, tl.full((row.shape[0], shape.head_pad), 0, tl.float32))


@triton.jit
def attend_tile(
    queries: Queries,
    tile: tl.tensor,
    request: Request,
    softmax: Softmax,
    layer: Layer,
    shape: tl.constexpr,
    READS_CACHE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Softmax:
    """Attend to BLOCK_N keys from `tile` on, a multiple of BLOCK_N, which divides the VQ block.

    READS_CACHE: every query sees exactly what a decode step would; else what the first of the request does.
    """
    keys = tile + tl.arange(0, BLOCK_N)
    present = keys <= queries.latest
    seen_until = tl.load(layer.last_query + keys, mask=present, other=-1)
    if not READS_CACHE:
        seen_until = tl.where(seen_until >= request.start, ALWAYS, seen_until)
    visible = keys[None, :] <= queries.positions[:, None]
    if shape.window > 0:
        visible &= keys[None, :] > queries.positions[:, None] - shape.window
    exact = seen_until[None, :] >= queries.positions[:, None]
    # Both kinds of rows are skipped where no query of the tile sees one: most tiles have only coded rows.
    if tl.max((present & (seen_until < queries.latest)).to(tl.int32), 0) > 0:
        softmax = attend_coded(queries, visible & ~exact, keys, present, tile, request, softmax, layer, shape)
    kept = present & (seen_until >= queries.earliest)
    if shape.window > 0:
        kept &= keys > queries.earliest - shape.window  # Rows before it may be gone.
    if tl.max(kept.to(tl.int32), 0) > 0:
        softmax = attend_exact(queries, visible & exact, keys, kept, request, softmax, layer, shape)
    return softmax


@triton.jit
def attend_coded(
    queries: Queries,
    visible: tl.tensor,
    keys: tl.tensor,
    present: tl.tensor,
    tile: tl.tensor,
    request: Request,
    softmax: Softmax,
    layer: Layer,
    shape: tl.constexpr,
) -> Softmax:
    """One step of the online softmax over what the codes of `keys` stand for, anchors corrected."""
    block = vq_block(request, tile // shape.block_size, shape)
    offsets = keys % shape.block_size
    # Anchors of a block serve the queries behind it: those in the block would see rows chosen after them.
    anchored = (queries.earliest // shape.block_size > tile // shape.block_size) & (shape.anchor_rows > 0)

    k_codes = in_vq_page(layer.k_codes, block.id, block.head, layer) + offsets * shape.code_bytes
    first_codes, second_codes = load_key_codes(k_codes, shape)
    raw_first, raw_second = look_up_key_halves(
        first_codes, second_codes, head_centroids(layer.k_centroids, request.head, shape), shape
    )
    pairs = tl.arange(0, shape.half_pad)
    key_first, key_second = rotate(raw_first, raw_second, block, offsets, present, pairs, layer, shape)
    is_anchor = keys < 0
    if anchored:
        key_first, key_second, is_anchor = correct_keys(key_first, key_second, offsets, block, layer, shape)
    dtype: tl.constexpr = queries.first.dtype
    logits = scaled_products(queries.first, queries.second, key_first.to(dtype), key_second.to(dtype), queries.scale)
    if shape.has_jensen:
        logits += tl.where(is_anchor[None, :], 0.0, queries.bias[:, None])
    logits = tl.where(visible, capped(logits, shape), float("-inf"))
    probs, decay, maximum, total = softmax_step(logits, softmax)

    v_codes = in_vq_page(layer.v_codes, block.id, block.head, layer) + offsets * shape.code_bytes
    v_centroids = head_centroids(layer.v_centroids, request.head, shape)
    value = look_up_values(load_value_codes(v_codes, shape), v_centroids, shape).to(dtype)
    if anchored:
        value = correct_values(value, offsets, block, layer, shape)
    return Softmax(maximum, total, accumulate(probs, decay, value, softmax.weighted))


@triton.jit
def correct_keys(
    key_first: tl.tensor, key_second: tl.tensor, offsets: tl.tensor, block: Block, layer: Layer, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add what the K codes of anchors of the block lose, or put the rows in their place; (N,) bool, which they are."""
    is_anchor = offsets < 0
    if shape.corrections:
        row = anchor_row(offsets, 0, block, layer, shape)
        held = row >= 0
        if tl.max(held.to(tl.int32), 0) > 0:
            pointers = in_vq_page(layer.k_anchors, block.id, block.head, layer) + row * shape.anchor_bytes
            first, second = load_halves(pointers, held, layer, True, shape)
            key_first += from_e4m3(first)
            key_second += from_e4m3(second)
        is_anchor |= held
    if shape.exact_anchor > 0:
        row = anchor_row(offsets + shape.exact_anchor, 0, block, layer, shape)
        held = row >= 0
        if tl.max(held.to(tl.int32), 0) > 0:
            pointers = in_vq_page(layer.k_exact, block.id, block.head, layer) + row // 2 * shape.head_size
            first, second = load_halves(pointers, held, layer, True, shape)
            key_first = tl.where(held[:, None], first.to(tl.float32), key_first)
            key_second = tl.where(held[:, None], second.to(tl.float32), key_second)
        is_anchor |= held
    return key_first, key_second, is_anchor


@triton.jit
def correct_values(value: tl.tensor, offsets: tl.tensor, block: Block, layer: Layer, shape: tl.constexpr) -> tl.tensor:
    """Add what the V codes of anchors of the block lose, or put the rows in their place."""
    channels = tl.arange(0, shape.head_pad)
    if shape.corrections:
        row = anchor_row(offsets, 1, block, layer, shape)
        held = row >= 0
        if tl.max(held.to(tl.int32), 0) > 0:
            pointers = in_vq_page(layer.v_anchors, block.id, block.head, layer) + row * shape.anchor_bytes
            correction = from_e4m3(load_rows(pointers, held, channels, channels < shape.head_size))
            value = (value.to(tl.float32) + correction).to(value.dtype)
    if shape.exact_anchor > 0:
        row = anchor_row(offsets + shape.exact_anchor, 1, block, layer, shape)
        held = row >= 0
        if tl.max(held.to(tl.int32), 0) > 0:
            pointers = in_vq_page(layer.v_exact, block.id, block.head, layer) + row // 2 * shape.head_size
            exact = load_rows(pointers, held, channels, channels < shape.head_size)
            value = tl.where(held[:, None], exact.to(value.dtype), value)
    return value


@triton.jit
def anchor_row(offsets: tl.tensor, kind: tl.constexpr, block: Block, layer: Layer, shape: tl.constexpr) -> tl.tensor:
    """(N,) int32, the anchor row of each of these offsets in a block, negative for none. kind: 0 for K, 1 for V."""
    row = tl.arange(0, shape.anchor_pad)
    first = in_vq_page(layer.anchor_offsets, block.id, block.head, layer) + kind * shape.anchor_rows
    held = tl.load(first + row, mask=row < shape.anchor_rows, other=-1).to(tl.int32)
    return tl.max(tl.where(held[None, :] == offsets[:, None], row[None, :], -1), 1)


@triton.jit
def attend_exact(
    queries: Queries,
    visible: tl.tensor,
    keys: tl.tensor,
    kept: tl.tensor,
    request: Request,
    softmax: Softmax,
    layer: Layer,
    shape: tl.constexpr,
) -> Softmax:
    """One step of the online softmax over full-precision rows; only the `kept` ones are read, others may be gone."""
    query_first, query_second = queries.first, queries.second
    if shape.ordered:
        # To have them at hand for every tile would fill the registers.
        query_first, query_second = load_halves(queries.at, queries.positions >= 0, layer, False, shape)
    k_rows = exact_rows(0, keys, kept, request, layer, shape)
    mark_missing(k_rows, kept, request, layer)
    pairs = tl.arange(0, shape.half_pad)
    first_channels, second_channels = channels_of_pairs(pairs, shape)
    key_first = load_exact(k_rows, first_channels, pairs < shape.head_size // 2)
    key_second = load_exact(k_rows, second_channels, pairs < shape.head_size // 2)
    logits = scaled_products(query_first, query_second, key_first, key_second, queries.scale)
    logits = tl.where(visible, capped(logits, shape), float("-inf"))
    probs, decay, maximum, total = softmax_step(logits, softmax)
    v_rows = exact_rows(1, keys, kept, request, layer, shape)
    channels = tl.arange(0, shape.head_pad)
    value = load_exact(v_rows, channels, channels < shape.head_size)
    return Softmax(maximum, total, accumulate(probs, decay, value, softmax.weighted))


@triton.jit
def scaled_products(
    query_first: tl.tensor, query_second: tl.tensor, key_first: tl.tensor, key_second: tl.tensor, scale: tl.tensor
) -> tl.tensor:
    """(M, N) scaled products of queries and keys, times log2(e)."""
    products = tl.dot(query_first, tl.trans(key_first), input_precision="tf32x3")
    products = tl.dot(query_second, tl.trans(key_second), products, input_precision="tf32x3")
    return products * (scale * LOG2E)


@triton.jit
def softmax_step(logits: tl.tensor, softmax: Softmax) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(M, N) unnormalised probabilities, (M,) factor for what was summed before, and the new maximum and sum."""
    new_maximum = tl.maximum(softmax.maximum, tl.max(logits, 1))
    # A row that has seen nothing yet has no maximum to subtract.
    subtracted = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    probs = tl.exp2(logits - subtracted[:, None])
    decay = tl.exp2(softmax.maximum - subtracted)
    return probs, decay, new_maximum, softmax.total * decay + tl.sum(probs, 1)


@triton.jit
def accumulate(probs: tl.tensor, decay: tl.tensor, value: tl.tensor, weighted: tl.tensor) -> tl.tensor:
    """(M, head_pad) float32 weighted sum of V so far."""
    return tl.dot(probs.to(value.dtype), value, weighted * decay[:, None], input_precision="tf32x3")
