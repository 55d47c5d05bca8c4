"""Attention of few queries to the part of their past that all see through codes alone: where decode spends its time.

`attention.attend_tile` takes any tile. Here every key is there, coded, visible, and in a closed block other than the
queries', so that most of the work on a key can be done on something smaller:

* Queries are rotated back to the first position of a tile, and keys by their offset in the tile alone: all tiles need
  the same cosines and sines, which stay in registers.
* Anchors leave the tiles. What the corrections of several blocks add to the logits is one product with the query; a
  tile picks its own by a product with a matrix of ones and zeros. Weights of V anchors are picked out the same way, and
  multiplied with the corrections once. Of anchors that are kept as they are, the logits and the weights of the codes
  become 0.
* Products are of float16 (float32 in float32 models), as centroids are: decoded V is not converted, K is rotated as it
  comes, and both are nearer the truth than in bfloat16. The query is scaled before it is rounded, far from the limits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arguments import Block, Layer, Request, Softmax
from .attention import accumulate, softmax_step
from .codes import head_centroids, load_key_codes, load_value_codes, look_up_key_halves, look_up_values
from .common import LOG2E, capped, from_e4m3, in_vq_page, load_halves, load_rows, vq_blocks


class Anchors(NamedTuple):
    """Anchors of some blocks of the past, A rows of K and of V; inside kernels.

    k, v: (A,) int32 positions, negative for none.
    k_exact, v_exact: (A,) bool, which are kept as they are.
    k_logits: (M, A) float32, what they add to the logits of their codes, of which it takes the bias, or their logits.
    v_rows: (A, head_pad), what the codes lose, or the rows as they are.
    exact_tiles: int32, a bit for each tile, set where it has one that is kept as it is.
    """

    k: tl.tensor
    v: tl.tensor
    k_exact: tl.tensor
    v_exact: tl.tensor
    k_logits: tl.tensor
    v_rows: tl.tensor
    exact_tiles: tl.tensor


@triton.jit
def attend_past(
    at: tl.tensor,
    real: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    request: Request,
    scale: tl.tensor,
    bias: tl.tensor,
    softmax: Softmax,
    layer: Layer,
    shape: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Softmax:
    """Attend to the keys `begin .. end`, multiples of BLOCK_N with `begin < end`, which divides the VQ block.

    Args:
        at: (M,) pointers to the queries of a KV head at positions of one VQ block.
        real: (M,) which of them there are.
        scale, bias: see `Queries`.
    """
    dtype: tl.constexpr = tl.float32 if at.dtype.element_ty == tl.float32 else tl.float16
    # Anchors of as many blocks at a time as fill the smallest product.
    BLOCKS: tl.constexpr = 16 // shape.anchor_pad if shape.anchor_pad < 16 else 1
    CHUNK: tl.constexpr = BLOCKS * shape.block_size
    pairs = tl.arange(0, shape.half_pad)
    offsets = tl.arange(0, BLOCK_N)
    query_first, query_second = load_halves(at, real, layer, True, shape)
    query_first = query_first.to(tl.float32) * (scale * LOG2E)
    query_second = query_second.to(tl.float32) * (scale * LOG2E)
    cos, sin = row_angles(layer, offsets, pairs, shape)
    cos = cos.to(dtype)
    sin = sin.to(dtype)
    k_centroids = head_centroids(layer.k_centroids, request.head, shape)
    v_centroids = head_centroids(layer.v_centroids, request.head, shape)
    maximum, total, weighted = softmax.maximum, softmax.total, softmax.weighted
    first_codes, second_codes, value_codes = codes_of_tile(begin, offsets, request, layer, shape)
    for chunk in range(begin // shape.block_size * shape.block_size, end, CHUNK):
        v_weights = tl.full((real.shape[0], BLOCKS * shape.anchor_pad), 0, tl.float32)
        if shape.anchor_rows > 0:
            anchors = anchors_of_chunk(at, real, chunk, end, request, scale, bias, layer, shape, BLOCKS, BLOCK_N)
            # Whole logits need more than the bits of float16.
            k_rest = anchors.k_logits - anchors.k_logits.to(dtype).to(tl.float32)
        for tile in range(tl.maximum(begin, chunk), tl.minimum(chunk + CHUNK, end), BLOCK_N):
            keys = tile + offsets
            first, second = look_up_key_halves(first_codes, second_codes, k_centroids, shape)
            value = look_up_values(value_codes, v_centroids, shape).to(dtype)
            # They are asked for a tile ahead: from the block table to the centroids is three latencies of memory.
            ahead = tl.minimum(tile + BLOCK_N, end - BLOCK_N)
            first_codes, second_codes, value_codes = codes_of_tile(ahead, offsets, request, layer, shape)
            first = first.to(dtype)
            second = second.to(dtype)
            rotated_first, rotated_second = rotate_back(query_first, query_second, tile, layer, pairs, shape)
            logits = tl.dot(rotated_first.to(dtype), tl.trans(first * cos - second * sin), input_precision="tf32x3")
            logits = tl.dot(
                rotated_second.to(dtype), tl.trans(second * cos + first * sin), logits, input_precision="tf32x3"
            )
            if shape.has_jensen:
                logits += bias[:, None]
            if shape.anchor_rows > 0:
                has_exact = (anchors.exact_tiles >> (tile - chunk) // BLOCK_N) & 1
                own = anchors.k[:, None] == keys[None, :]
                picked = own.to(dtype)
                if has_exact > 0:
                    logits = tl.where(any_of(own & anchors.k_exact[:, None], 0)[None, :], 0.0, logits)
                if shape.has_jensen or has_exact > 0:
                    logits = tl.dot(k_rest.to(dtype), picked, logits, input_precision="tf32x3")
                logits = tl.dot(anchors.k_logits.to(dtype), picked, logits, input_precision="tf32x3")
            probs, decay, maximum, total = softmax_step(capped(logits, shape), Softmax(maximum, total, weighted))
            if shape.anchor_rows > 0:
                own = keys[:, None] == anchors.v[None, :]
                v_weights = accumulate(probs, decay, own.to(dtype), v_weights)
                if has_exact > 0:
                    probs = tl.where(any_of(own & anchors.v_exact[None, :], 1)[None, :], 0.0, probs)
            weighted = accumulate(probs, decay, value, weighted)
        if shape.anchor_rows > 0:
            weighted = tl.dot(v_weights.to(dtype), anchors.v_rows, weighted, input_precision="tf32x3")
    return Softmax(maximum, total, weighted)


@triton.jit
def anchors_of_chunk(
    at: tl.tensor,
    real: tl.tensor,
    chunk: tl.tensor,
    end: tl.tensor,
    request: Request,
    scale: tl.tensor,
    bias: tl.tensor,
    layer: Layer,
    shape: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Anchors:
    """Those of BLOCKS blocks from position `chunk` on, as far as they begin before `end`; see `attend_past`."""
    dtype: tl.constexpr = tl.float32 if at.dtype.element_ty == tl.float32 else tl.float16
    slot = tl.arange(0, BLOCKS * shape.anchor_pad)
    block = chunk // shape.block_size + slot // shape.anchor_pad
    used = (block * shape.block_size < end) & (slot % shape.anchor_pad < shape.anchor_rows)
    ids = tl.load(vq_blocks(request) + block, mask=used, other=0).to(tl.int64)
    blocks = Block(block * shape.block_size, ids, request.head)
    k, k_exact = anchors_of(0, blocks, slot, used, layer, shape)
    v, v_exact = anchors_of(1, blocks, slot, used, layer, shape)
    k_rows = rows_of(layer.k_anchors, layer.k_exact, k, k_exact, blocks, slot, dtype, layer, shape)
    v_rows = rows_of(layer.v_anchors, layer.v_exact, v, v_exact, blocks, slot, dtype, layer, shape)
    exact_tiles = 0
    if shape.exact_anchor > 0:
        exact_tiles = tiles_of(k, k_exact, chunk, BLOCK_N) | tiles_of(v, v_exact, chunk, BLOCK_N)
    channels = tl.arange(0, shape.head_pad)
    query = load_rows(at, real, channels, channels < shape.head_size).to(tl.float32) * (scale * LOG2E)
    k_logits = tl.dot(query.to(dtype), tl.trans(k_rows), input_precision="tf32x3")
    if shape.has_jensen:
        k_logits -= tl.where(k_exact[None, :], 0.0, bias[:, None])
    return Anchors(k, v, k_exact, v_exact, k_logits, v_rows, exact_tiles)


@triton.jit
def codes_of_tile(
    tile: tl.tensor, offsets: tl.tensor, request: Request, layer: Layer, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Codes of the keys `tile + offsets`: of the halves of K, and of V."""
    block = tl.load(vq_blocks(request) + tile // shape.block_size).to(tl.int64)
    row = (tile % shape.block_size + offsets) * shape.code_bytes
    first, second = load_key_codes(in_vq_page(layer.k_codes, block, request.head, layer) + row, shape)
    return first, second, load_value_codes(in_vq_page(layer.v_codes, block, request.head, layer) + row, shape)


@triton.jit
def anchors_of(
    kind: tl.constexpr, blocks: Block, slot: tl.tensor, used: tl.tensor, layer: Layer, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Of the anchor rows `slot` of blocks: (A,) int32 positions of the anchors, negative for none; (A,) bool, whether
    they are kept as they are. kind: 0 K, 1 V.
    """
    section = in_vq_page(layer.anchor_offsets, blocks.id, blocks.head, layer) + kind * shape.anchor_rows
    offset = tl.load(section + slot % shape.anchor_pad, mask=used, other=-1).to(tl.int32)
    is_exact = offset >= shape.block_size
    return tl.where(offset >= 0, blocks.origin + offset % shape.block_size, -1), is_exact


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
    blocks: Block,
    slot: tl.tensor,
    dtype: tl.constexpr,
    layer: Layer,
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
        at = in_vq_page(section, blocks.id, blocks.head, layer) + row * shape.anchor_bytes
        result = from_e4m3(load_rows(at, (anchors >= 0) & ~is_exact, channels, in_head)).to(dtype)
    if shape.exact_anchor > 0:
        at = in_vq_page(exact_section, blocks.id, blocks.head, layer) + row // 2 * shape.head_size
        result += load_rows(at, is_exact, channels, in_head).to(dtype)
    return result


@triton.jit
def row_angles(
    layer: Layer, positions: tl.tensor, pairs: tl.tensor, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Cosines and sines at `positions` (N,), (N, P) float32 each; 1 and 0 of channels that do not rotate."""
    index = positions[:, None] * shape.rotary_half + pairs[None, :]
    rotating = (positions >= 0)[:, None] & (pairs < shape.rotary_half)[None, :]
    return tl.load(layer.cos + index, mask=rotating, other=1.0), tl.load(layer.sin + index, mask=rotating, other=0.0)


@triton.jit
def rotate_back(
    first: tl.tensor, second: tl.tensor, position: tl.tensor, layer: Layer, pairs: tl.tensor, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Halves (M, P) float32 of queries, rotated by `-position`."""
    rotating = pairs < shape.rotary_half
    index = position * shape.rotary_half + pairs
    cos = tl.load(layer.cos + index, mask=rotating, other=1.0)
    sin = tl.load(layer.sin + index, mask=rotating, other=0.0)
    # Some tables carry a magnitude, which must not count twice.
    magnitude = tl.rsqrt(cos * cos + sin * sin)
    cos = (cos * magnitude)[None, :]
    sin = (sin * magnitude)[None, :]
    return first * cos + second * sin, second * cos - first * sin
