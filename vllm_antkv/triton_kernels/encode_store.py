"""Writes the tokens of a step to their pages: codes of K (before RoPE) and V, and full-precision rows that are kept.

Grid (tiles of tokens, num_kv_heads, K and V pairs of sub-vectors and one more): tokens of several requests share a
tile, so that a step of many single tokens is still a few matrix products; the last program of a tile copies rows.
"""

import triton
import triton.language as tl

from .arguments import Batch, Layer, Rows, Shape
from .common import ALWAYS, channels_in_rows, find_request, in_recency_page, in_vq_page, load_rows, rope_positions
from .launch import Fixed, launch

#: Tokens from which larger tiles leave no multiprocessor idle.
_MANY_TOKENS = 512
#: Centroids at a time: 64 registers for the distances of 64 tokens.
_BLOCK_C = 128


def encode_store(rows: Fixed, layer: Fixed, batch: Fixed, shape: Shape) -> None:
    """Store the codes of the step's tokens, and the rows of those that own a recency page.

    Only `key` and `value` of `rows` are read. Token 0 of a block resets the block's anchors: blocks fill from there.
    rows, layer, batch: `Rows`, `Layer` and `Batch`.
    """
    num_tokens = rows.argument.key.shape[0]
    block_t = 64 if num_tokens >= _MANY_TOKENS else 16
    num_pairs = (shape.num_sub_vectors + 1) // 2
    launch(
        _encode_store_kernel,
        (-(-num_tokens // block_t), shape.num_kv_heads, 2 * num_pairs + 1),
        rows,
        layer,
        batch,
        batch.argument.seq_lens.shape[0],
        shape=shape,
        BLOCK_T=block_t,
        BLOCK_C=min(_BLOCK_C, shape.num_centroids),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_reqs"])
def _encode_store_kernel(
    rows: Rows,
    layer: Layer,
    batch: Batch,
    num_reqs: tl.tensor,
    shape: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """One pair of sub-vectors of K or V, or the rows, of one (tile of tokens, KV head)."""
    num_pairs: tl.constexpr = (shape.num_sub_vectors + 1) // 2
    head, part = tl.program_id(1), tl.program_id(2)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    request = find_request(batch.query_start_loc, num_reqs, tokens, 1)
    next_request = tl.load(batch.query_start_loc + request + 1)
    # Graphs are captured with room for more tokens than a step may have.
    real = tokens < next_request
    positions = tl.load(batch.seq_lens + request, mask=real, other=0) - (next_request - tokens)
    if part < 2 * num_pairs:
        block = tl.load(
            batch.vq_table + request * batch.vq_table_stride + positions // shape.block_size, mask=real, other=0
        ).to(tl.int64)
        store_codes(tokens, positions, real, block, head, part, rows, layer, shape, BLOCK_C)
    else:
        store_rows(tokens, positions, real, request, head, rows, layer, batch, shape)


@triton.jit
def store_codes(
    tokens: tl.tensor,
    positions: tl.tensor,
    real: tl.tensor,
    block: tl.tensor,
    head: tl.tensor,
    part: tl.tensor,
    rows: Rows,
    layer: Layer,
    shape: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Encode a pair of sub-vectors of K (even parts) or V of tokens (T,), and write its bytes."""
    is_key = part % 2 == 0
    pair = part // 2
    stride = tl.where(is_key, rows.key_stride, rows.value_stride)
    pointers = tl.where(is_key, rows.key, rows.value) + tokens.to(tl.int64) * stride + head * shape.head_size
    centroids = tl.where(is_key, layer.k_centroids, layer.v_centroids)
    half_norms = tl.where(is_key, layer.k_half_norms, layer.v_half_norms)
    codes = tl.where(is_key, layer.k_codes, layer.v_codes)
    offset = positions % shape.block_size
    target = in_vq_page(codes, block, head, layer) + offset * shape.code_bytes

    first = nearest(
        pointers, positions, block, real, head, 2 * pair, is_key, centroids, half_norms, layer, shape, BLOCK_C
    )
    # An odd number of sub-vectors leaves the last pair without its second: it encodes zeros that are not stored.
    has_second = real & (tokens < tl.where(2 * pair + 1 < shape.num_sub_vectors, ALWAYS, 0))
    sub = (2 * pair + 1) % shape.num_sub_vectors
    second = nearest(
        pointers, positions, block, has_second, head, sub, is_key, centroids, half_norms, layer, shape, BLOCK_C
    )
    if shape.code_bits == 8:
        tl.store(target + 2 * pair, first.to(tl.uint8), mask=real)
        tl.store(target + 2 * pair + 1, second.to(tl.uint8), mask=has_second)
    else:
        second = tl.where(has_second, second, 0)
        tl.store(target + 3 * pair, (first & 0xFF).to(tl.uint8), mask=real)
        tl.store(target + 3 * pair + 1, ((first >> 8) | ((second & 0xF) << 4)).to(tl.uint8), mask=real)
        tl.store(target + 3 * pair + 2, (second >> 4).to(tl.uint8), mask=has_second)


@triton.jit
def nearest(
    pointers: tl.tensor,
    positions: tl.tensor,
    block: tl.tensor,
    mask: tl.tensor,
    head: tl.tensor,
    sub: tl.tensor,
    is_key: tl.tensor,
    centroids: tl.tensor,
    half_norms: tl.tensor,
    layer: Layer,
    shape: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tl.tensor:
    """(T,) int32, index of the nearest centroid of sub-vector `sub` of the rows at `pointers`; ties take the lower.

    argmin |x - c|^2 = argmin |c|^2 / 2 - x.c. Centroids are float16 in the codebook already, so splitting x alone in
    two float16 gives the product to float32's precision from two fast matrix instructions.
    """
    DEPTH: tl.constexpr = shape.sub_vector_size if shape.sub_vector_size > 16 else 16
    lane = tl.arange(0, DEPTH)
    in_sub = lane < shape.sub_vector_size
    channels = sub * shape.sub_vector_size + lane
    x = raw_sub_vectors(pointers, positions, block, mask, channels, in_sub, is_key, layer, shape)
    # Beyond float16's range the nearest centroid is that of the clamped value: no centroid lies there.
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    first = (head * shape.num_sub_vectors + sub) * shape.num_centroids
    best = tl.full((positions.shape[0],), float("inf"), tl.float32)
    code = tl.full((positions.shape[0],), 0, tl.int32)
    for begin in range(0, shape.num_centroids, BLOCK_C):
        index = first + begin + tl.arange(0, BLOCK_C)
        table = tl.load(
            centroids + index[None, :] * shape.sub_vector_size + lane[:, None], mask=in_sub[:, None], other=0.0
        )
        distance = tl.load(half_norms + index)[None, :] - tl.dot(low, table, tl.dot(high, table))
        smallest, at = tl.min(distance, 1, return_indices=True, return_indices_tie_break_left=True)
        code = tl.where(smallest < best, begin + at, code)
        best = tl.minimum(best, smallest)
    return code


@triton.jit
def raw_sub_vectors(
    pointers: tl.tensor,
    positions: tl.tensor,
    block: tl.tensor,
    mask: tl.tensor,
    channels: tl.tensor,
    channel_mask: tl.tensor,
    is_key: tl.tensor,
    layer: Layer,
    shape: tl.constexpr,
) -> tl.tensor:
    """(T, C) float32 channels of rows, K before RoPE: each channel rotated back with the other one of its pair."""
    x = load_places(pointers, mask, channels, channel_mask, is_key, layer, shape)
    if shape.rotary_half == 0:
        return x
    rotating = (channels < tl.where(is_key, 2 * shape.rotary_half, 0)) & channel_mask
    if shape.is_neox:
        is_first = channels < shape.rotary_half
        partner = tl.where(is_first, channels + shape.rotary_half, channels - shape.rotary_half)
        pair = tl.where(is_first, channels, channels - shape.rotary_half)
    else:
        is_first = channels % 2 == 0
        partner = tl.where(is_first, channels + 1, channels - 1)
        pair = channels // 2
    other = load_places(pointers, mask, partner, rotating, is_key, layer, shape)
    known = mask[:, None] & rotating[None, :]
    rotated_by = rope_positions(positions, block, pair, known, layer, shape)
    angle = rotated_by * shape.rotary_half + pair[None, :]
    cos = tl.load(layer.cos + angle, mask=known, other=1.0)
    sin = tl.load(layer.sin + angle, mask=known, other=0.0)
    signed = tl.where(is_first[None, :], other, -other)
    return (x * cos + signed * sin) / (cos * cos + sin * sin)


@triton.jit
def load_places(
    pointers: tl.tensor,
    mask: tl.tensor,
    places: tl.tensor,
    place_mask: tl.tensor,
    is_key: tl.tensor,
    layer: Layer,
    shape: tl.constexpr,
) -> tl.tensor:
    """(T, C) float32, what stands at `places` of rows once their channels are as sub-vectors take them."""
    channels = places
    if shape.ordered:
        channels = tl.where(is_key, channels_in_rows(places, layer, shape), places)
    return load_rows(pointers, mask, channels, place_mask).to(tl.float32)


@triton.jit
def store_rows(
    tokens: tl.tensor,
    positions: tl.tensor,
    real: tl.tensor,
    request: tl.tensor,
    head: tl.tensor,
    rows: Rows,
    layer: Layer,
    batch: Batch,
    shape: tl.constexpr,
) -> None:
    """Copy the rows of tokens that own a recency page, and empty the anchors of blocks that begin."""
    page = tl.load(
        batch.recency_table + request * batch.recency_table_stride + positions // shape.page_size, mask=real, other=0
    ).to(tl.int64)
    kept = real & (page > 0)
    channels = tl.arange(0, shape.head_pad)
    in_head = channels < shape.head_size
    in_page = (positions % shape.page_size * shape.head_size)[:, None] + channels[None, :]
    source = tokens.to(tl.int64)
    new_key = load_rows(rows.key + source * rows.key_stride + head * shape.head_size, kept, channels, in_head)
    new_value = load_rows(rows.value + source * rows.value_stride + head * shape.head_size, kept, channels, in_head)
    stored = kept[:, None] & in_head[None, :]
    tl.store(in_recency_page(layer.recent_k, page, head, layer)[:, None] + in_page, new_key, mask=stored)
    tl.store(in_recency_page(layer.recent_v, page, head, layer)[:, None] + in_page, new_value, mask=stored)
    if shape.anchor_rows > 0:
        begins = real & (positions % shape.block_size == 0)
        block = tl.load(
            batch.vq_table + request * batch.vq_table_stride + positions // shape.block_size, mask=begins, other=0
        ).to(tl.int64)
        row = tl.arange(0, 2 * shape.anchor_pad)
        emptied = in_vq_page(layer.anchor_offsets, block, head, layer)
        unused = tl.full((positions.shape[0], 2 * shape.anchor_pad), -1, tl.int16)
        in_block = begins[:, None] & (row < 2 * shape.anchor_rows)[None, :]
        tl.store(emptied[:, None] + row[None, :], unused, mask=in_block)
