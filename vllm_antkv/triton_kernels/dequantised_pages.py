"""Plain rows for a kernel that knows nothing else: what codes stand for, or full precision.

Grid (num_pages + some, block_size // N, 2 num_kv_heads): N rows of K or of V of a page; the last programs extend the
queries, a tile of a head each. What is on which page is planned on the host.
"""

import triton
import triton.language as tl

from .arguments import Batch, Block, ExactRows, Layer, PlainRows, Request, Rows, Shape
from .attention import coded_bias, correct_keys, correct_values
from .codes import head_centroids, load_key_codes, load_value_codes, look_up_key_halves, look_up_values
from .common import (
    channels_in_rows,
    channels_of_pairs,
    exact_rows,
    in_vq_page,
    load_exact,
    load_rows,
    mark_missing,
    rotate,
    vq_block,
)
from .launch import Fixed, launch

_BLOCK_N = 32
_ROWS = 16


def write_dequantised_pages(
    rows: Fixed, plain: Fixed, pages: Fixed, extends: bool, layer: Fixed, batch: Fixed, shape: Shape, scale: float
) -> None:
    """Write all rows of the wanted pages, and queries where `extends`: see `ops.varlen.DequantisedPageWriter`.

    rows, plain, layer, batch: `Rows`, `PlainRows`, `Layer` and `Batch`. pages: (num_pages, 2) int32, request and VQ
    block. scale: multiplies the logits.
    """
    num_pages, num_tokens = pages.argument.shape[0], 0
    together = shape.block_size // _BLOCK_N, 2 * shape.num_kv_heads
    num_rows = num_pages
    if extends:
        num_tokens = rows.argument.query.shape[0]
        tiles = -(-num_tokens // _ROWS) * shape.num_kv_heads * shape.group
        num_rows += -(-tiles // (together[0] * together[1]))
    launch(
        _dequantised_pages_kernel,
        (num_rows, *together),
        rows,
        plain,
        pages,
        num_pages,
        num_tokens,
        layer,
        batch,
        scale,
        shape=shape,
        BLOCK_N=_BLOCK_N,
        ROWS=_ROWS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["pages", "num_pages", "num_tokens", "scale"])
def _dequantised_pages_kernel(
    rows: Rows,
    plain: PlainRows,
    pages: tl.tensor,
    num_pages: tl.tensor,
    num_tokens: tl.tensor,
    layer: Layer,
    batch: Batch,
    scale: tl.tensor,
    shape: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """BLOCK_N rows of K or V of one KV head, or ROWS queries of one head."""
    page = tl.program_id(0)
    if shape.dequantised_key_size > shape.head_size:
        index = (page - num_pages) * tl.num_programs(1) + tl.program_id(1)
        index = index * tl.num_programs(2) + tl.program_id(2)
        if index >= 0:
            num_heads: tl.constexpr = shape.num_kv_heads * shape.group
            tile, head = index // num_heads, index % num_heads
            _extend_queries(tile, head, rows, plain.queries, num_tokens, layer, scale, shape, ROWS)
            return
    head = tl.program_id(2) // 2
    index = tl.load(pages + page * 2)
    number = tl.load(pages + page * 2 + 1)
    first_row = tl.load(batch.query_start_loc + index)
    end = tl.load(batch.seq_lens + index)
    start = end - (tl.load(batch.query_start_loc + index + 1) - first_row)
    request = Request(index, start, first_row, head, rows, batch)
    offsets = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = number * shape.block_size + offsets
    present = keys < end
    # The first query sees these rows in full precision, and so all of the request do.
    exact = tl.load(layer.last_query + keys, mask=present, other=-1) >= start
    any_coded = tl.max((present & ~exact).to(tl.int32), 0) > 0
    row = page.to(tl.int64) * shape.block_size + offsets
    written = row * shape.num_kv_heads + head
    block = vq_block(request, number, shape)
    if tl.program_id(2) % 2 == 0:
        to = plain.key + written * shape.dequantised_key_size
        in_full = exact_rows(0, keys, exact, request, layer, shape)
        mark_missing(in_full, exact, request, layer)
        is_anchor = keys < 0
        if any_coded:
            is_anchor = _write_keys(to, offsets, present, ~exact, block, layer, shape)
        _write_bias_channels(to, present & ~exact & ~is_anchor, shape)
        _write_exact(to, in_full, exact | ~present, shape)
    else:
        to = plain.value + written * shape.dequantised_value_size
        in_full = exact_rows(1, keys, exact, request, layer, shape)
        if any_coded:
            _write_values(to, offsets, ~exact, block, layer, shape)
        if shape.dequantised_value_size > shape.head_size:
            _write_bias_channels(to, keys < 0, shape)
        _write_exact(to, in_full, exact | ~present, shape)


@triton.jit
def _write_keys(
    to: tl.tensor,
    offsets: tl.tensor,
    present: tl.tensor,
    mask: tl.tensor,
    block: Block,
    layer: Layer,
    shape: tl.constexpr,
) -> tl.tensor:
    """K that codes stand for at `offsets` (N,) of a block, rotated, anchors corrected; to pointers (N,).

    Returns which of them are anchors, (N,) bool.
    """
    pairs = tl.arange(0, shape.half_pad)
    known = pairs < shape.head_size // 2
    codes = in_vq_page(layer.k_codes, block.id, block.head, layer) + offsets * shape.code_bytes
    first_codes, second_codes = load_key_codes(codes, shape)
    centroids = head_centroids(layer.k_centroids, block.head, shape)
    key_first, key_second = look_up_key_halves(first_codes, second_codes, centroids, shape)
    key_first, key_second = rotate(key_first, key_second, block, offsets, present, pairs, layer, shape)
    is_anchor = offsets < 0
    if shape.anchor_rows > 0:
        key_first, key_second, is_anchor = correct_keys(key_first, key_second, offsets, block, layer, shape)
    first, second = channels_of_pairs(pairs, shape)
    _store(to, channels_in_rows(first, layer, shape), known, key_first, mask)
    _store(to, channels_in_rows(second, layer, shape), known, key_second, mask)
    return is_anchor


@triton.jit
def _write_bias_channels(to: tl.tensor, is_code: tl.tensor, shape: tl.constexpr) -> None:
    """What rows have beyond the channels of a head: see `ops.varlen.BIAS_CHANNELS`."""
    if shape.has_jensen:
        channels = tl.arange(0, shape.dequantised_key_size - shape.head_size)
        ones = tl.where(is_code[:, None] & (channels < 2)[None, :], 1.0, 0.0)
        tl.store((to + shape.head_size)[:, None] + channels[None, :], ones.to(to.dtype.element_ty))


@triton.jit
def _write_exact(to: tl.tensor, exact: ExactRows, mask: tl.tensor, shape: tl.constexpr) -> None:
    """Rows in full precision; 0 where they are gone."""
    channels = tl.arange(0, shape.head_pad)
    known = channels < shape.head_size
    _store(to, channels, known, load_exact(exact, channels, known), mask)


@triton.jit
def _write_values(
    to: tl.tensor, offsets: tl.tensor, mask: tl.tensor, block: Block, layer: Layer, shape: tl.constexpr
) -> None:
    """V that codes stand for, anchors corrected."""
    codes = in_vq_page(layer.v_codes, block.id, block.head, layer) + offsets * shape.code_bytes
    value = look_up_values(load_value_codes(codes, shape), head_centroids(layer.v_centroids, block.head, shape), shape)
    value = value.to(to.dtype.element_ty)
    if shape.anchor_rows > 0:
        value = correct_values(value, offsets, block, layer, shape)
    channels = tl.arange(0, shape.head_pad)
    _store(to, channels, channels < shape.head_size, value, mask)


@triton.jit
def _store(pointers: tl.tensor, channels: tl.tensor, known: tl.tensor, numbers: tl.tensor, mask: tl.tensor) -> None:
    """Write (N, C) channels of the rows that start at `pointers` (N,) where neither is masked."""
    at = pointers[:, None] + channels[None, :]
    tl.store(at, numbers.to(pointers.dtype.element_ty), mask=mask[:, None] & known[None, :])


@triton.jit
def _extend_queries(
    tile: tl.tensor,
    head: tl.tensor,
    rows: Rows,
    queries: tl.tensor,
    num_tokens: tl.tensor,
    layer: Layer,
    scale: tl.tensor,
    shape: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Queries of one head with the channels that plain rows have beyond a head's, ROWS of them."""
    row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = row < num_tokens
    at = rows.query + row * rows.query_stride + head * shape.head_size
    to = queries + (row * shape.num_kv_heads * shape.group + head) * shape.dequantised_key_size
    channels = tl.arange(0, shape.head_pad)
    in_head = channels < shape.head_size
    _store(to, channels, in_head, load_rows(at, real, channels, in_head), real)
    bias = coded_bias(at, head + tl.zeros_like(row), real, layer.jensen_weights, shape) / scale
    rounded = bias.to(queries.dtype.element_ty).to(tl.float32)
    channels = tl.arange(0, shape.dequantised_key_size - shape.head_size)
    rest = tl.where(channels[None, :] == 1, (bias - rounded)[:, None], 0.0)
    parts = tl.where(channels[None, :] == 0, rounded[:, None], rest)
    _store(to + shape.head_size, channels, channels >= 0, parts, real)
