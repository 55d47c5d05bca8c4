"""The second half of `anchor_score`: which rows of a VQ block that closes become its anchors."""

import triton
import triton.language as tl

from .arguments import ExactRows, Pages, Tables
from .common import channels_in_rows, channels_of_pairs, decode_channels, head_centroids, in_vq_page, load_exact, turn

#: Channels at a time where all rows of a block are read: 32 bytes of a row are one sector of memory, and few registers.
_CHUNK = tl.constexpr(16)


@triton.jit
def key_error(
    k_rows: ExactRows,
    keys: tl.tensor,
    block_id: tl.tensor,
    head: tl.tensor,
    pages: Pages,
    tables: Tables,
    shape: tl.constexpr,
) -> tl.tensor:
    """(block_size,) float32, distance of the K rows of a full block from what their codes stand for."""
    offsets = keys % shape.block_size
    codes = in_vq_page(pages.k_codes, block_id, head, pages) + offsets * shape.code_bytes
    centroids = head_centroids(tables.k_centroids, head, shape)
    total = tl.full((shape.block_size,), 0, tl.float32)
    for begin in range(0, shape.head_size // 2, _CHUNK):
        pairs = begin + tl.arange(0, _CHUNK)
        first_channel, second_channel = channels_of_pairs(pairs, shape)
        first = decode_channels(codes, centroids, first_channel, shape)
        second = decode_channels(codes, centroids, second_channel, shape)
        first, second = turn(first, second, tables, tl.min(keys, 0), offsets, offsets >= 0, pairs, shape)
        known = pairs < shape.head_size // 2
        first = load_exact(k_rows, channels_in_rows(first_channel, tables, shape), known).to(tl.float32) - first
        second = load_exact(k_rows, channels_in_rows(second_channel, tables, shape), known).to(tl.float32) - second
        total += tl.sum(tl.where(known[None, :], first * first + second * second, 0.0), 1)
    return tl.sqrt(total)


@triton.jit
def value_error(
    v_rows: ExactRows,
    keys: tl.tensor,
    block_id: tl.tensor,
    head: tl.tensor,
    pages: Pages,
    tables: Tables,
    shape: tl.constexpr,
) -> tl.tensor:
    """(block_size,) float32, distance of the V rows of a full block from what their codes stand for."""
    codes = in_vq_page(pages.v_codes, block_id, head, pages) + keys % shape.block_size * shape.code_bytes
    centroids = head_centroids(tables.v_centroids, head, shape)
    total = tl.full((shape.block_size,), 0, tl.float32)
    for begin in range(0, shape.head_size, _CHUNK):
        channels = begin + tl.arange(0, _CHUNK)
        known = channels < shape.head_size
        coded = decode_channels(codes, centroids, channels, shape).to(tl.float32)
        difference = load_exact(v_rows, channels, known).to(tl.float32) - coded
        total += tl.sum(tl.where(known[None, :], difference * difference, 0.0), 1)
    return tl.sqrt(total)


@triton.jit
def choose(
    scores: tl.tensor,
    error: tl.tensor,
    exact: ExactRows,
    kind: tl.constexpr,
    keys: tl.tensor,
    prefix: tl.tensor,
    block_id: tl.tensor,
    head: tl.tensor,
    count: tl.tensor,
    pages: Pages,
    shape: tl.constexpr,
    policy: tl.constexpr,
    COUNTS: tl.constexpr,
) -> None:
    """Write the rows with the highest scores, and their offsets, to the anchors of a block. kind: 0 for K, 1 for V."""
    offsets = keys % shape.block_size
    ranked = rank_scores(scores, error, offsets, keys < prefix, shape, policy)
    num_candidates = tl.sum((ranked > float("-inf")).to(tl.int32), 0)
    place = offsets * 0 + shape.anchor_rows
    for rank in range(shape.anchor_rows):
        # Equal scores take the lower offset, on every device.
        at = tl.argmax(ranked, 0, tie_break_left=True)
        place = tl.where((offsets == at) & (ranked > float("-inf")), rank, place)
        ranked = tl.where(offsets == at, float("-inf"), ranked)
    taken = place < shape.anchor_rows

    row = tl.arange(0, shape.anchor_pad)
    unused = (row < shape.anchor_rows) & (row >= num_candidates)
    target = in_vq_page(pages.anchor_offsets, block_id, head, pages) + kind * shape.anchor_rows
    tl.store(target + row, tl.full((shape.anchor_pad,), -1, tl.int16), mask=unused)
    tl.store(target + place, offsets.to(tl.int16), mask=taken)
    if COUNTS:
        tl.atomic_add(count, tl.sum(taken.to(tl.int64), 0))

    anchors = in_vq_page(pages.k_anchors if kind == 0 else pages.v_anchors, block_id, head, pages)
    for begin in range(0, shape.head_size, _CHUNK):
        channels = begin + tl.arange(0, _CHUNK)
        in_head = channels < shape.head_size
        where = anchors + place[:, None] * shape.head_size + channels[None, :]
        tl.store(where, load_exact(exact, channels, in_head), mask=taken[:, None] & in_head[None, :])


@triton.jit
def rank_scores(
    scores: tl.tensor,
    error: tl.tensor,
    offsets: tl.tensor,
    already_exact: tl.tensor,
    shape: tl.constexpr,
    policy: tl.constexpr,
) -> tl.tensor:
    """(block_size,) what rows compete with: sinks first, -inf where a row cannot be chosen; see `select.anchors`."""
    is_sink = scores == float("inf")
    if policy.anchors:
        weighted = scores * error
        if not policy.weighs_votes:
            weighted = weighted * error
        else:
            weighted = weighted / (shape.block_size - offsets + policy.vote_prior).to(tl.float32)
    else:
        weighted = tl.full((shape.block_size,), float("-inf"), tl.float32)
    ranked = tl.where(is_sink, float("inf"), weighted)
    return tl.where(already_exact, float("-inf"), ranked)
