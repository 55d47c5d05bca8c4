"""The second half of `anchor_score`: which rows of a VQ block that closes become its anchors, and what they store."""

import triton
import triton.language as tl

from .arguments import Block, ExactRows, Layer
from .codes import decode_channels, head_centroids
from .common import channels_in_rows, channels_of_pairs, in_vq_page, load_exact, rotate, to_e4m3

#: Channels at a time where all rows of a block are read: 32 bytes of a row are one sector of memory, and few registers.
_CHUNK = tl.constexpr(16)


@triton.jit
def key_errors(
    k_rows: ExactRows, offsets: tl.tensor, pairs: tl.tensor, block: Block, layer: Layer, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """What the codes of K rows lose in the first and the second channels of `pairs`, (N, P) float32 each.

    k_rows, offsets: of N tokens of the block.
    """
    codes = in_vq_page(layer.k_codes, block.id, block.head, layer) + offsets * shape.code_bytes
    centroids = head_centroids(layer.k_centroids, block.head, shape)
    first_channel, second_channel = channels_of_pairs(pairs, shape)
    first = decode_channels(codes, centroids, first_channel, shape)
    second = decode_channels(codes, centroids, second_channel, shape)
    first, second = rotate(first, second, block, offsets, offsets >= 0, pairs, layer, shape)
    known = pairs < shape.head_size // 2
    first = load_exact(k_rows, channels_in_rows(first_channel, layer, shape), known).to(tl.float32) - first
    second = load_exact(k_rows, channels_in_rows(second_channel, layer, shape), known).to(tl.float32) - second
    return first, second


@triton.jit
def value_errors(
    v_rows: ExactRows, offsets: tl.tensor, channels: tl.tensor, block: Block, layer: Layer, shape: tl.constexpr
) -> tl.tensor:
    """What the codes of V rows lose in `channels`, (N, C) float32; v_rows, offsets: of N tokens of a block."""
    codes = in_vq_page(layer.v_codes, block.id, block.head, layer) + offsets * shape.code_bytes
    coded = decode_channels(codes, head_centroids(layer.v_centroids, block.head, shape), channels, shape)
    return load_exact(v_rows, channels, channels < shape.head_size).to(tl.float32) - coded.to(tl.float32)


@triton.jit
def key_error(k_rows: ExactRows, offsets: tl.tensor, block: Block, layer: Layer, shape: tl.constexpr) -> tl.tensor:
    """(block_size,) float32, distance of the K rows of a full block from what their codes stand for."""
    total = tl.full((shape.block_size,), 0, tl.float32)
    for begin in range(0, shape.head_size // 2, _CHUNK):
        pairs = begin + tl.arange(0, _CHUNK)
        first, second = key_errors(k_rows, offsets, pairs, block, layer, shape)
        known = pairs < shape.head_size // 2
        total += tl.sum(tl.where(known[None, :], first * first + second * second, 0.0), 1)
    return tl.sqrt(total)


@triton.jit
def value_error(v_rows: ExactRows, offsets: tl.tensor, block: Block, layer: Layer, shape: tl.constexpr) -> tl.tensor:
    """(block_size,) float32, distance of the V rows of a full block from what their codes stand for."""
    total = tl.full((shape.block_size,), 0, tl.float32)
    for begin in range(0, shape.head_size, _CHUNK):
        channels = begin + tl.arange(0, _CHUNK)
        errors = value_errors(v_rows, offsets, channels, block, layer, shape)
        total += tl.sum(tl.where((channels < shape.head_size)[None, :], errors * errors, 0.0), 1)
    return tl.sqrt(total)


@triton.jit
def choose(
    scores: tl.tensor,
    error: tl.tensor,
    kind: tl.constexpr,
    keys: tl.tensor,
    prefix: tl.tensor,
    block: Block,
    count: tl.tensor,
    layer: Layer,
    shape: tl.constexpr,
    policy: tl.constexpr,
    COUNTS: tl.constexpr,
) -> tl.tensor:
    """Write the offsets of the rows with the highest scores to the anchors of a block. kind: 0 for K, 1 for V.

    Returns them as written, (anchor_pad,) int32: negative where there are fewer, and for the second of two anchor rows
    that one token takes; see `select.anchors`.
    """
    offsets = keys % shape.block_size
    ranked = rank_scores(scores, error, offsets, keys < prefix, shape, policy)
    num_candidates = tl.sum((ranked > float("-inf")).to(tl.int32), 0)
    row = tl.arange(0, shape.anchor_pad)
    RANKS: tl.constexpr = shape.anchor_rows // 2 if policy.exact else shape.anchor_rows
    num_exact = 0
    if policy.exact:
        num_exact = tl.minimum(num_candidates, shape.anchor_rows // 2)
    elif shape.exact_anchor > 0:
        num_sinks = tl.sum((ranked == float("inf")).to(tl.int32), 0)
        num_exact = tl.maximum(tl.minimum(num_sinks, shape.anchor_rows - num_sinks), 0)
    is_exact = row < 2 * num_exact
    rank = tl.where(is_exact, row // 2, row - num_exact)
    held = row * 0
    for index in range(RANKS):
        # Equal scores take the lower offset, on every device.
        at = tl.argmax(ranked, 0, tie_break_left=True)
        held = tl.where(rank == index, at, held)
        ranked = tl.where(offsets == at, float("-inf"), ranked)
    held = tl.where((row < shape.anchor_rows) & (rank < num_candidates), held, -1)
    held = tl.where(is_exact, tl.where(row % 2 == 0, held + shape.exact_anchor, -1), held)
    target = in_vq_page(layer.anchor_offsets, block.id, block.head, layer) + kind * shape.anchor_rows
    tl.store(target + row, held.to(tl.int16), mask=row < shape.anchor_rows)
    if COUNTS:
        tl.atomic_add(count, tl.sum((held >= 0).to(tl.int64), 0))
    return held


@triton.jit
def store_keys(k_rows: ExactRows, held: tl.tensor, block: Block, layer: Layer, shape: tl.constexpr) -> None:
    """Write K anchors. k_rows, held: (anchor_pad,), of the tokens that `choose` returned, and what it returned."""
    if shape.exact_anchor > 0:
        store_exact(layer.k_exact, k_rows, held, block, layer, shape)
        held = tl.where(held < shape.exact_anchor, held, -1)
    if not shape.corrections:
        return
    rows = (
        in_vq_page(layer.k_anchors, block.id, block.head, layer) + tl.arange(0, shape.anchor_pad) * shape.anchor_bytes
    )
    for begin in range(0, shape.head_size // 2, _CHUNK):
        pairs = begin + tl.arange(0, _CHUNK)
        first, second = key_errors(k_rows, tl.maximum(held, 0), pairs, block, layer, shape)
        first_channel, second_channel = channels_of_pairs(pairs, shape)
        mask = (held >= 0)[:, None] & (pairs < shape.head_size // 2)[None, :]
        tl.store(rows[:, None] + channels_in_rows(first_channel, layer, shape)[None, :], to_e4m3(first), mask=mask)
        tl.store(rows[:, None] + channels_in_rows(second_channel, layer, shape)[None, :], to_e4m3(second), mask=mask)


@triton.jit
def store_values(v_rows: ExactRows, held: tl.tensor, block: Block, layer: Layer, shape: tl.constexpr) -> None:
    """Write V anchors; arguments as of `store_keys`."""
    if shape.exact_anchor > 0:
        store_exact(layer.v_exact, v_rows, held, block, layer, shape)
        held = tl.where(held < shape.exact_anchor, held, -1)
    if not shape.corrections:
        return
    rows = (
        in_vq_page(layer.v_anchors, block.id, block.head, layer) + tl.arange(0, shape.anchor_pad) * shape.anchor_bytes
    )
    for begin in range(0, shape.head_size, _CHUNK):
        channels = begin + tl.arange(0, _CHUNK)
        errors = value_errors(v_rows, tl.maximum(held, 0), channels, block, layer, shape)
        mask = (held >= 0)[:, None] & (channels < shape.head_size)[None, :]
        tl.store(rows[:, None] + channels[None, :], to_e4m3(errors), mask=mask)


@triton.jit
def store_exact(
    section: tl.tensor, rows: ExactRows, held: tl.tensor, block: Block, layer: Layer, shape: tl.constexpr
) -> None:
    """Write the anchors that are kept as they are to `section`, `k_exact` or `v_exact`; see `store_keys`."""
    kept = held >= shape.exact_anchor
    target = in_vq_page(section, block.id, block.head, layer) + tl.arange(0, shape.anchor_pad) // 2 * shape.head_size
    for begin in range(0, shape.head_size, _CHUNK):
        channels = begin + tl.arange(0, _CHUNK)
        known = channels < shape.head_size
        row = load_exact(rows, channels, known)
        tl.store(target[:, None] + channels[None, :], row, mask=kept[:, None] & known[None, :])


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
        num_votes = shape.block_size - offsets
        if shape.window > 0:
            num_votes = tl.minimum(num_votes, shape.window)
        weighted = scores * error / (num_votes + policy.vote_prior).to(tl.float32)
    else:
        weighted = tl.full((shape.block_size,), float("-inf"), tl.float32)
    ranked = tl.where(is_sink, float("inf"), weighted)
    return tl.where(already_exact, float("-inf"), ranked)
