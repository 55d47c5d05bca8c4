"""Plain rows for a kernel that knows nothing else: what codes stand for, or full precision; and merging what it gives.

Grid of the writer (num_pages, block_size // N, 2 num_kv_heads): N rows of K or of V of a page. What is on which page is
planned on the host. Grid of the others (rows, num_heads).
"""

import torch
import triton
import triton.language as tl

from .arguments import Batch, DequantisedPages, ExactRows, Pages, Request, Rows, Shape, Tables
from .attention import coded_bias, correct_keys, correct_values
from .codes import head_centroids, load_key_codes, load_value_codes, look_up_key_halves, look_up_values
from .common import channels_in_rows, channels_of_pairs, exact_rows, in_vq_page, load_exact, load_rows, rotate

_BLOCK_N = 32
_ROWS = 16


def write_dequantised_pages(
    rows: Rows, plain: DequantisedPages, prefix: int, pages: Pages, tables: Tables, batch: Batch, shape: Shape
) -> None:
    """Write all rows of the wanted pages; those that nobody sees are finite.

    Args:
        prefix: first tokens of a sequence that have their exact rows on every page.
    """
    _dequantised_pages_kernel[(len(plain.page_requests), shape.block_size // _BLOCK_N, 2 * shape.num_kv_heads)](
        rows, plain, prefix, pages, tables, batch, shape, BLOCK_N=_BLOCK_N, num_warps=4
    )


@triton.jit(do_not_specialize=["prefix"])
def _dequantised_pages_kernel(
    rows: Rows,
    plain: DequantisedPages,
    prefix: tl.tensor,
    pages: Pages,
    tables: Tables,
    batch: Batch,
    shape: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """BLOCK_N rows of K or V of one KV head."""
    page = tl.program_id(0)
    head = tl.program_id(2) // 2
    index = tl.load(plain.page_requests + page * 3)
    block = tl.load(plain.page_requests + page * 3 + 1)
    is_exact = tl.load(plain.page_requests + page * 3 + 2) != 0
    first_row = tl.load(batch.query_start_loc + index)
    end = tl.load(batch.seq_lens + index)
    start = end - (tl.load(batch.query_start_loc + index + 1) - first_row)
    request = Request(index, start, first_row, head)
    offsets = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = block * shape.block_size + offsets
    in_full = keys < tl.where(is_exact, (block + 1) * shape.block_size, prefix)
    # A row is there as long as some query sees it, and none of the step sees more than the first.
    seen_until = tl.load(tables.last_query + keys, mask=keys < end, other=-1)
    alive = in_full & (keys < end) & (seen_until >= start)
    row = page.to(tl.int64) * shape.block_size + offsets
    written = (row * shape.num_kv_heads + head) * shape.dequantised_size
    block_id = tl.load(batch.vq_table + index * batch.vq_table_stride + block).to(tl.int64)
    if tl.program_id(2) % 2 == 0:
        exact = exact_rows(pages.recent_k, rows.key, rows.key_stride, keys, alive, request, pages, batch, shape)
        is_anchor = keys < 0
        if not is_exact:
            present = keys < end
            is_anchor = _write_keys(
                plain.key + written, offsets, present, keys >= prefix, block, block_id, head, pages, tables, shape
            )
        _write_bias_channels(plain.key + written, ~in_full & ~is_anchor, shape)
        _write_exact(plain.key + written, exact, in_full, shape)
    else:
        exact = exact_rows(pages.recent_v, rows.value, rows.value_stride, keys, alive, request, pages, batch, shape)
        if not is_exact:
            _write_values(plain.value + written, offsets, keys >= prefix, block_id, head, pages, tables, shape)
        _write_bias_channels(plain.value + written, keys < 0, shape)
        _write_exact(plain.value + written, exact, in_full, shape)


@triton.jit
def _write_keys(
    to: tl.tensor,
    offsets: tl.tensor,
    present: tl.tensor,
    mask: tl.tensor,
    block: tl.tensor,
    block_id: tl.tensor,
    head: tl.tensor,
    pages: Pages,
    tables: Tables,
    shape: tl.constexpr,
) -> tl.tensor:
    """K that codes stand for at `offsets` (N,) of a block, rotated, anchors corrected; to pointers (N,).

    Returns which of them are anchors, (N,) bool.
    """
    pairs = tl.arange(0, shape.half_pad)
    known = pairs < shape.head_size // 2
    codes = in_vq_page(pages.k_codes, block_id, head, pages) + offsets * shape.code_bytes
    first_codes, second_codes = load_key_codes(codes, shape)
    centroids = head_centroids(tables.k_centroids, head, shape)
    key_first, key_second = look_up_key_halves(first_codes, second_codes, centroids, shape)
    origin = block * shape.block_size
    key_first, key_second = rotate(
        key_first, key_second, tables, origin, block_id, offsets, present, pairs, pages, shape
    )
    is_anchor = offsets < 0
    if shape.anchor_rows > 0:
        key_first, key_second, is_anchor = correct_keys(
            key_first, key_second, offsets, block_id, head, pages, tables, shape
        )
    first, second = channels_of_pairs(pairs, shape)
    _store(to, channels_in_rows(first, tables, shape), known, key_first, mask)
    _store(to, channels_in_rows(second, tables, shape), known, key_second, mask)
    return is_anchor


@triton.jit
def _write_bias_channels(to: tl.tensor, is_code: tl.tensor, shape: tl.constexpr) -> None:
    """What rows have beyond the channels of a head: see `ops.varlen.BIAS_CHANNELS`."""
    if shape.has_jensen:
        channels = tl.arange(0, shape.dequantised_size - shape.head_size)
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
    to: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    block_id: tl.tensor,
    head: tl.tensor,
    pages: Pages,
    tables: Tables,
    shape: tl.constexpr,
) -> None:
    """V that codes stand for, anchors corrected."""
    codes = in_vq_page(pages.v_codes, block_id, head, pages) + offsets * shape.code_bytes
    value = look_up_values(load_value_codes(codes, shape), head_centroids(tables.v_centroids, head, shape), shape)
    value = value.to(to.dtype.element_ty)
    if shape.anchor_rows > 0:
        value = correct_values(value, offsets, block_id, head, pages, shape)
    channels = tl.arange(0, shape.head_pad)
    _store(to, channels, channels < shape.head_size, value, mask)


@triton.jit
def _store(pointers: tl.tensor, channels: tl.tensor, known: tl.tensor, numbers: tl.tensor, mask: tl.tensor) -> None:
    """Write (N, C) channels of the rows that start at `pointers` (N,) where neither is masked."""
    at = pointers[:, None] + channels[None, :]
    tl.store(at, numbers.to(pointers.dtype.element_ty), mask=mask[:, None] & known[None, :])


def extend_queries(query: torch.Tensor, extended: torch.Tensor, tables: Tables, shape: Shape, scale: float) -> None:
    """Give queries the channels that plain rows have beyond those of a head.

    Args:
        query: (n, num_heads, head_size) model dtype, heads contiguous.
        extended: (n, num_heads, dequantised_size) model dtype, contiguous; written.
        scale: multiplies the logits.
    """
    num_rows, num_heads, _ = query.shape
    _extend_queries_kernel[(triton.cdiv(num_rows, _ROWS), num_heads)](
        query, query.stride(0), extended, num_rows, tables, scale, shape, ROWS=_ROWS, num_warps=4
    )


@triton.jit(do_not_specialize=["num_rows"])
def _extend_queries_kernel(
    query: tl.tensor,
    query_stride: tl.tensor,
    extended: tl.tensor,
    num_rows: tl.tensor,
    tables: Tables,
    scale: tl.tensor,
    shape: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """ROWS rows of one query head."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    real = row < num_rows
    at = query + row * query_stride + head * shape.head_size
    to = extended + (row * shape.num_kv_heads * shape.group + head) * shape.dequantised_size
    channels = tl.arange(0, shape.head_pad)
    in_head = channels < shape.head_size
    _store(to, channels, in_head, load_rows(at, real, channels, in_head), real)
    bias = coded_bias(at, head + tl.zeros_like(row), real, tables, shape) / scale
    rounded = bias.to(extended.dtype.element_ty).to(tl.float32)
    channels = tl.arange(0, shape.dequantised_size - shape.head_size)
    rest = tl.where(channels[None, :] == 1, (bias - rounded)[:, None], 0.0)
    parts = tl.where(channels[None, :] == 0, rounded[:, None], rest)
    _store(to + shape.head_size, channels, channels >= 0, parts, real)


def merge_attention(
    output: torch.Tensor, lse: torch.Tensor, other_output: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Add what other keys gave.

    Args:
        output: (n, num_heads, head_size) model dtype, heads contiguous; written.
        lse: (num_heads, n) float32, natural log-sum-exp; written. Infinite, of either sign, where nothing was seen.
        other_output, other_lse: the same of the other keys; heads of any stride.
    """
    num_rows, num_heads, head_size = output.shape
    _merge_attention_kernel[(triton.cdiv(num_rows, _ROWS), num_heads)](
        output,
        output.stride(0),
        lse,
        lse.stride(0),
        other_output,
        *other_output.stride()[:2],
        other_lse,
        other_lse.stride(0),
        num_rows,
        HEAD_SIZE=head_size,
        HEAD_PAD=triton.next_power_of_2(head_size),
        ROWS=_ROWS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["lse_stride", "other_lse_stride", "num_rows"])
def _merge_attention_kernel(
    output: tl.tensor,
    output_stride: tl.tensor,
    lse: tl.tensor,
    lse_stride: tl.tensor,
    other_output: tl.tensor,
    other_stride: tl.tensor,
    other_head_stride: tl.tensor,
    other_lse: tl.tensor,
    other_lse_stride: tl.tensor,
    num_rows: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """ROWS rows of one query head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    real = row < num_rows
    theirs = _seen(tl.load(other_lse + head.to(tl.int64) * other_lse_stride + row, mask=real, other=float("-inf")))
    # Most rows see nothing in most calls but the first.
    if tl.max(theirs, 0) == float("-inf"):
        return
    statistics = lse + head.to(tl.int64) * lse_stride + row
    ours = _seen(tl.load(statistics, mask=real, other=float("-inf")))
    maximum = tl.maximum(ours, theirs)
    subtracted = tl.where(maximum == float("-inf"), 0.0, maximum)
    our_weight = tl.exp(ours - subtracted)
    their_weight = tl.exp(theirs - subtracted)
    total = our_weight + their_weight
    channels = tl.arange(0, HEAD_PAD)[None, :]
    written = (real & (total > 0))[:, None] & (channels < HEAD_SIZE)
    at = output + row.to(tl.int64)[:, None] * output_stride + head * HEAD_SIZE + channels
    other = other_output + row.to(tl.int64)[:, None] * other_stride + head * other_head_stride + channels
    mine = tl.load(at, mask=written, other=0).to(tl.float32) * (our_weight / total)[:, None]
    merged = mine + tl.load(other, mask=written, other=0).to(tl.float32) * (their_weight / total)[:, None]
    tl.store(at, merged.to(output.dtype.element_ty), mask=written)
    tl.store(statistics, maximum + tl.log(total), mask=real & (total > 0))


@triton.jit
def _seen(lse: tl.tensor) -> tl.tensor:
    """Log-sum-exps of which those of nothing are -inf: some kernels call it inf."""
    return tl.where(lse == float("inf"), float("-inf"), lse)
