"""Attention of a single query to the part of its past that it sees through codes alone: where decode spends its time.

`attention.attend_tile` takes any tile. Here every key is there, coded, visible, and in a closed block other than the
query's, so that most of the work on a key can be done on something smaller:

* The query is turned back to the first position of a tile, and keys by their offset in the tile alone: all tiles need
  the same cosines and sines, which stay in registers.
* Anchors leave the tiles. What the corrections of several blocks add to the logits is one product with the query; a
  tile picks its own by a product with a matrix of ones and zeros. Weights of V anchors are picked out the same way, and
  multiplied with the corrections once. Of anchors that are kept as they are, the logits and the weights of the codes
  become 0.
* Products are of float16 (float32 in float32 models), as centroids are: decoded V is not converted, K is turned as it
  comes, and both are nearer the truth than in bfloat16. The query is scaled before it is rounded, far from the limits.
"""

import triton
import triton.language as tl

from .arguments import Batch, Pages, Tables
from .attention import accumulate, softmax_step
from .codes import head_centroids, load_key_codes, load_value_codes, look_up_key_halves, look_up_values
from .common import LOG2E, capped, from_e4m3, in_vq_page, load_halves, load_rows


@triton.jit
def attend_past(
    queries: tl.tensor,
    real: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    request: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    pages: Pages,
    tables: Tables,
    batch: Batch,
    shape: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the keys `begin .. end`, multiples of BLOCK_N with `begin < end`, which divides the VQ block.

    Args:
        queries: (M,) pointers to the queries of a KV head at one position.
        real: (M,) which of them there are.
        maximum, total, weighted: of the online softmax so far, as `attention.attend_tile` has them.

    Returns:
        the same three, with these keys.
    """
    dtype: tl.constexpr = tl.float32 if queries.dtype.element_ty == tl.float32 else tl.float16
    # Anchors of as many blocks at a time as fill the smallest product.
    BLOCKS: tl.constexpr = 16 // shape.anchor_pad if shape.anchor_pad < 16 else 1
    SLOTS: tl.constexpr = BLOCKS * shape.anchor_pad
    CHUNK: tl.constexpr = BLOCKS * shape.block_size
    pairs = tl.arange(0, shape.half_pad)
    offsets = tl.arange(0, BLOCK_N)
    query_first, query_second = load_halves(queries, real, tables, True, shape)
    query_first = query_first.to(tl.float32) * (scale * LOG2E)
    query_second = query_second.to(tl.float32) * (scale * LOG2E)
    cos, sin = row_angles(tables, offsets, pairs, shape)
    cos = cos.to(dtype)
    sin = sin.to(dtype)
    k_centroids = head_centroids(tables.k_centroids, head, shape)
    v_centroids = head_centroids(tables.v_centroids, head, shape)
    first_codes, second_codes, value_codes = codes_of_tile(begin, offsets, request, head, pages, batch, shape)
    for chunk in range(begin // shape.block_size * shape.block_size, end, CHUNK):
        k_anchors = tl.full((SLOTS,), -1, tl.int32)
        v_anchors = k_anchors
        k_logits = tl.full((real.shape[0], SLOTS), 0, tl.float32)
        v_weights = k_logits
        k_rest = k_logits
        k_exact = k_anchors >= 0
        v_exact = k_exact
        exact_tiles = 0
        v_rows = tl.full((SLOTS, shape.head_pad), 0, dtype)
        if shape.anchor_rows > 0:
            slot = tl.arange(0, SLOTS)
            block = chunk // shape.block_size + slot // shape.anchor_pad
            used = (block * shape.block_size < end) & (slot % shape.anchor_pad < shape.anchor_rows)
            anchored_ids = tl.load(batch.vq_table + request * batch.vq_table_stride + block, mask=used, other=0)
            k_anchors, k_exact = anchors_of(0, block, anchored_ids, slot, used, head, pages, shape)
            v_anchors, v_exact = anchors_of(1, block, anchored_ids, slot, used, head, pages, shape)
            k_rows = rows_of(
                pages.k_anchors, pages.k_exact, k_anchors, k_exact, anchored_ids, slot, head, dtype, pages, shape
            )
            v_rows = rows_of(
                pages.v_anchors, pages.v_exact, v_anchors, v_exact, anchored_ids, slot, head, dtype, pages, shape
            )
            if shape.exact_anchor > 0:
                exact_tiles = tiles_of(k_anchors, k_exact, chunk, BLOCK_N)
                exact_tiles |= tiles_of(v_anchors, v_exact, chunk, BLOCK_N)
            channels = tl.arange(0, shape.head_pad)
            query = load_rows(queries, real, channels, channels < shape.head_size).to(tl.float32) * (scale * LOG2E)
            k_logits = tl.dot(query.to(dtype), tl.trans(k_rows), input_precision="tf32x3")
            # Whole logits need more than the bits of float16.
            k_rest = k_logits - k_logits.to(dtype).to(tl.float32)
        for tile in range(tl.maximum(begin, chunk), tl.minimum(chunk + CHUNK, end), BLOCK_N):
            keys = tile + offsets
            has_exact = (exact_tiles >> (tile - chunk) // BLOCK_N) & 1
            first, second = look_up_key_halves(first_codes, second_codes, k_centroids, shape)
            value = look_up_values(value_codes, v_centroids, shape).to(dtype)
            # They are asked for a tile ahead: from the block table to the centroids is three latencies of memory.
            ahead = tl.minimum(tile + BLOCK_N, end - BLOCK_N)
            first_codes, second_codes, value_codes = codes_of_tile(ahead, offsets, request, head, pages, batch, shape)
            first = first.to(dtype)
            second = second.to(dtype)
            turned_first, turned_second = turn_back(query_first, query_second, tile, tables, pairs, shape)
            logits = tl.dot(turned_first.to(dtype), tl.trans(first * cos - second * sin), input_precision="tf32x3")
            logits = tl.dot(
                turned_second.to(dtype), tl.trans(second * cos + first * sin), logits, input_precision="tf32x3"
            )
            if shape.anchor_rows > 0:
                own = k_anchors[:, None] == keys[None, :]
                picked = own.to(dtype)
                if has_exact > 0:
                    logits = tl.where(any_of(own & k_exact[:, None], 0)[None, :], 0.0, logits)
                    logits = tl.dot(k_rest.to(dtype), picked, logits, input_precision="tf32x3")
                logits = tl.dot(k_logits.to(dtype), picked, logits, input_precision="tf32x3")
            probs, decay, maximum, total = softmax_step(capped(logits, shape), maximum, total)
            if shape.anchor_rows > 0:
                own = keys[:, None] == v_anchors[None, :]
                v_weights = accumulate(probs, decay, own.to(dtype), v_weights)
                if has_exact > 0:
                    probs = tl.where(any_of(own & v_exact[None, :], 1)[None, :], 0.0, probs)
            weighted = accumulate(probs, decay, value, weighted)
        if shape.anchor_rows > 0:
            weighted = tl.dot(v_weights.to(dtype), v_rows, weighted, input_precision="tf32x3")
    return maximum, total, weighted


@triton.jit
def codes_of_tile(
    tile: tl.tensor,
    offsets: tl.tensor,
    request: tl.tensor,
    head: tl.tensor,
    pages: Pages,
    batch: Batch,
    shape: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Codes of the keys `tile + offsets`: of the halves of K, and of V."""
    block = tl.load(batch.vq_table + request * batch.vq_table_stride + tile // shape.block_size).to(tl.int64)
    row = (tile % shape.block_size + offsets) * shape.code_bytes
    first, second = load_key_codes(in_vq_page(pages.k_codes, block, head, pages) + row, shape)
    return first, second, load_value_codes(in_vq_page(pages.v_codes, block, head, pages) + row, shape)


@triton.jit
def anchors_of(
    kind: tl.constexpr,
    block: tl.tensor,
    block_id: tl.tensor,
    slot: tl.tensor,
    used: tl.tensor,
    head: tl.tensor,
    pages: Pages,
    shape: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Of the anchor rows `slot` of blocks: (A,) int32 positions of the anchors, negative for none; (A,) bool, whether
    they are kept as they are. kind: 0 K, 1 V.
    """
    section = in_vq_page(pages.anchor_offsets, block_id.to(tl.int64), head, pages) + kind * shape.anchor_rows
    offset = tl.load(section + slot % shape.anchor_pad, mask=used, other=-1).to(tl.int32)
    is_exact = offset >= shape.block_size
    return tl.where(offset >= 0, block * shape.block_size + offset % shape.block_size, -1), is_exact


@triton.jit
def tiles_of(anchors: tl.tensor, chosen: tl.tensor, chunk: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """A bit for each tile from `chunk` on, set where it has one of the `chosen` anchors."""
    tile = tl.maximum(anchors - chunk, 0) // BLOCK_N
    return tl.reduce(tl.where(chosen, 1 << tile, 0), 0, either)


@triton.jit
def either(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Bits of both."""
    return first | second


@triton.jit
def any_of(flags: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Whether any along an axis is set."""
    return tl.max(flags.to(tl.int32), axis) > 0


@triton.jit
def rows_of(
    section: tl.tensor,
    exact_section: tl.tensor,
    anchors: tl.tensor,
    is_exact: tl.tensor,
    block_id: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    dtype: tl.constexpr,
    pages: Pages,
    shape: tl.constexpr,
) -> tl.tensor:
    """(A, head_pad) what the codes of anchors lose, or the rows as they are, channels as the model has them; 0 where
    `anchors` are negative.
    """
    row = slot % shape.anchor_pad
    channels = tl.arange(0, shape.head_pad)
    in_head = channels < shape.head_size
    result = tl.full((anchors.shape[0], shape.head_pad), 0, dtype)
    if shape.corrections:
        at = in_vq_page(section, block_id.to(tl.int64), head, pages) + row * shape.anchor_bytes
        result = from_e4m3(load_rows(at, (anchors >= 0) & ~is_exact, channels, in_head)).to(dtype)
    if shape.exact_anchor > 0:
        at = in_vq_page(exact_section, block_id.to(tl.int64), head, pages) + row // 2 * shape.head_size
        result += load_rows(at, is_exact, channels, in_head).to(dtype)
    return result


@triton.jit
def row_angles(
    tables: Tables, positions: tl.tensor, pairs: tl.tensor, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Cosines and sines at `positions` (N,), (N, P) float32 each; 1 and 0 of channels that do not turn."""
    index = positions[:, None] * shape.rotary_half + pairs[None, :]
    turning = (positions >= 0)[:, None] & (pairs < shape.rotary_half)[None, :]
    return tl.load(tables.cos + index, mask=turning, other=1.0), tl.load(tables.sin + index, mask=turning, other=0.0)


@triton.jit
def turn_back(
    first: tl.tensor, second: tl.tensor, position: tl.tensor, tables: Tables, pairs: tl.tensor, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Halves (M, P) float32 of queries, turned by `-position`."""
    turning = pairs < shape.rotary_half
    index = position * shape.rotary_half + pairs
    cos = tl.load(tables.cos + index, mask=turning, other=1.0)
    sin = tl.load(tables.sin + index, mask=turning, other=0.0)
    # Some tables carry a magnitude, which must not count twice.
    magnitude = tl.rsqrt(cos * cos + sin * sin)
    cos = (cos * magnitude)[None, :]
    sin = (sin * magnitude)[None, :]
    return first * cos + second * sin, second * cos - first * sin
