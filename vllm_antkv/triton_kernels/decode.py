"""Attention of requests with a new token and drafts behind it: paged split-KV over codes, anchors and recent rows.

Grid (num_reqs * B, num_kv_heads, num_splits), B VQ blocks that new tokens of a request may lie in: one program attends
from all queries of a block and a KV head to one range of keys, so that a decoded row serves all drafts and the whole
group; splits keep the GPU busy where requests are few and long. A second kernel, grid (num_reqs * score_slots,
num_heads), merges the splits by their log-sum-exp. Requests with more than `score_slots` new tokens or none are left
alone. Short chunks of prompts pass for drafts: which they are, the device is not told.
"""

import torch
import triton
import triton.language as tl

from .arguments import Batch, Layer, Queries, Request, Rows, Shape
from .attention import attend_tile, coded_bias, nothing_seen, query_pointers
from .coded_past import attend_past
from .common import LOG2E, load_halves
from .launch import Fixed, autotuned

#: Splits that a merging program reads at a time.
_MERGED_TOGETHER = tl.constexpr(16)
_CONFIGS = [
    triton.Config({"BLOCK_N": 64}, num_warps=8, num_stages=1),
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=1),
    triton.Config({"BLOCK_N": 128}, num_warps=8, num_stages=1),
]


def decode(
    rows: Fixed,
    output: torch.Tensor,
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    layer: Fixed,
    batch: Fixed,
    shape: Shape,
    scale: float,
) -> None:
    """Attend from the requests that have at most `score_slots` new tokens.

    Args:
        output: (num_tokens, num_heads, head_size) model dtype, heads contiguous; written.
        partial_output: (num_reqs, score_slots, num_heads, num_splits, head_size) float32 scratch; its shape sets the
            splits.
        partial_lse: (num_reqs, score_slots, num_heads, num_splits) float32 scratch.
        rows, layer, batch: `Rows`, `Layer` and `Batch`.
        scale: multiplies the logits.
    """
    num_reqs, score_slots, num_heads, num_splits = partial_lse.shape
    num_blocks = (score_slots - 2) // shape.block_size + 2
    _decode_kernel[(num_reqs * num_blocks, shape.num_kv_heads, num_splits)](
        rows.argument, partial_output, partial_lse, layer.argument, batch.argument, num_splits, scale, shape, num_blocks
    )
    _merge_kernel[(num_reqs * score_slots, num_heads)](
        output,
        output.stride(0),
        partial_output,
        partial_lse,
        layer.argument.sinks,
        batch.argument,
        num_splits,
        shape,
        num_warps=4,
    )


@autotuned(_CONFIGS, key=["shape"])
@triton.jit(do_not_specialize=["num_splits"])
def _decode_kernel(
    rows: Rows,
    partial_output: tl.tensor,
    partial_lse: tl.tensor,
    layer: Layer,
    batch: Batch,
    num_splits: tl.tensor,
    scale: tl.tensor,
    shape: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One split of one (request and VQ block of its new tokens, KV head)."""
    index, head, split = tl.program_id(0) // NUM_BLOCKS, tl.program_id(1), tl.program_id(2)
    first_row = tl.load(batch.query_start_loc + index)
    num_new = tl.load(batch.query_start_loc + index + 1) - first_row
    if num_new > shape.score_slots:
        return
    start = tl.load(batch.seq_lens + index) - num_new
    own_block = start // shape.block_size + tl.program_id(0) % NUM_BLOCKS
    earliest = tl.maximum(start, own_block * shape.block_size)
    latest = tl.minimum(start + num_new, (own_block + 1) * shape.block_size) - 1
    if earliest > latest:
        return
    first_block = 0
    if shape.window > 0:
        first_block = tl.maximum(earliest - shape.window + 1, 0) // shape.block_size
    blocks_per_split = tl.cdiv(own_block + 1 - first_block, num_splits)
    begin = (first_block + split * blocks_per_split) * shape.block_size
    end = tl.minimum(begin + blocks_per_split * shape.block_size, latest + 1)

    # A matrix instruction has 16 rows, however few queries there are.
    row = tl.arange(0, shape.queries_pad * shape.group_pad if shape.queries_pad * shape.group_pad > 16 else 16)
    positions = earliest + row // shape.group_pad
    real = (positions <= latest) & (row % shape.group_pad < shape.group)
    heads = head * shape.group + row % shape.group_pad
    at = query_pointers(rows, first_row + positions - start, heads, shape)
    request = Request(index, start, first_row, head, rows, batch)
    bias = coded_bias(at, heads, real, layer.jensen_weights, shape) * LOG2E
    softmax = nothing_seen(row, shape)
    past_begin, past_end = coded_past(begin, end, earliest, latest, shape, BLOCK_N)
    if past_begin < past_end:
        softmax = attend_past(at, real, past_begin, past_end, request, scale, bias, softmax, layer, shape, BLOCK_N)
    first, second = load_halves(at, real, layer, True, shape)
    queries = Queries(at, first, second, tl.where(real, positions, -1), earliest, latest, scale, bias)
    for other in range(begin, end - (past_end - past_begin), BLOCK_N):
        tile = tl.where(other < past_begin, other, other + (past_end - past_begin))
        softmax = attend_tile(queries, tile, request, softmax, layer, shape, True, BLOCK_N)
    query = index * shape.score_slots + positions - start
    slot = (query * (shape.num_kv_heads * shape.group) + heads).to(tl.int64) * num_splits + split
    # A query that has seen nothing, as in splits behind the end of the sequence, has an LSE of -inf: nobody reads its
    # output.
    tl.store(partial_lse + slot, softmax.maximum + tl.log2(softmax.total), mask=real)
    channels = tl.arange(0, shape.head_pad)[None, :]
    tl.store(
        partial_output + slot[:, None] * shape.head_size + channels,
        softmax.weighted / softmax.total[:, None],
        mask=real[:, None] & (channels < shape.head_size),
    )


@triton.jit
def coded_past(
    begin: tl.tensor, end: tl.tensor, earliest: tl.tensor, latest: tl.tensor, shape: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The whole tiles between `begin` and `end` of which the queries `earliest .. latest`, of one block, see codes and
    anchors alone.
    """
    if not shape.composes:
        return begin, begin
    closed = earliest // shape.block_size * shape.block_size
    past_end = tl.minimum(tl.minimum(earliest - shape.exact_reach, closed), end) // BLOCK_N * BLOCK_N
    past_begin = tl.maximum(tl.cdiv(shape.exact_prefix, BLOCK_N) * BLOCK_N, begin)
    if shape.window > 0:
        past_begin = tl.maximum(tl.cdiv(tl.maximum(latest - shape.window + 1, 0), BLOCK_N) * BLOCK_N, past_begin)
    # Where there are none, all others begin at `begin`.
    return tl.where(past_begin < past_end, past_begin, begin), tl.where(past_begin < past_end, past_end, begin)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    output: tl.tensor,
    output_stride: tl.tensor,
    partial_output: tl.tensor,
    partial_lse: tl.tensor,
    sinks: tl.tensor,
    batch: Batch,
    num_splits: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Merge the splits of one (query of a request, head). Their LSE is in powers of two."""
    num_heads: tl.constexpr = shape.num_kv_heads * shape.group
    query, head = tl.program_id(0), tl.program_id(1)
    request = query // shape.score_slots
    first_row = tl.load(batch.query_start_loc + request)
    num_new = tl.load(batch.query_start_loc + request + 1) - first_row
    if (num_new > shape.score_slots) | (query % shape.score_slots >= num_new):
        return
    token = first_row + query % shape.score_slots
    channels = tl.arange(0, shape.head_pad)
    real = channels < shape.head_size
    maximum = float("-inf")
    total = 0.0
    if shape.has_sinks:
        maximum = tl.load(sinks + head) * LOG2E
        total = 1.0
    merged = tl.full((shape.head_pad,), 0, tl.float32)
    # Not all at once: their number is compiled in nowhere, so that no step waits for a compiler.
    for first in range(0, num_splits, _MERGED_TOGETHER):
        split = first + tl.arange(0, _MERGED_TOGETHER)
        slot = (query * num_heads + head).to(tl.int64) * num_splits + split
        statistics = tl.load(partial_lse + slot, mask=split < num_splits, other=float("-inf"))
        # One of the first two splits has seen keys: there is a maximum from the first turn on.
        new_maximum = tl.maximum(maximum, tl.max(statistics, 0))
        weights = tl.exp2(statistics - new_maximum)
        decay = tl.exp2(maximum - new_maximum)
        partial = tl.load(
            partial_output + slot[:, None] * shape.head_size + channels[None, :],
            mask=(statistics > float("-inf"))[:, None] & real[None, :],
            other=0.0,
        )
        merged = merged * decay + tl.sum(partial * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        maximum = new_maximum
    row = output + token.to(tl.int64) * output_stride + head * shape.head_size
    tl.store(row + channels, (merged / total).to(output.dtype.element_ty), mask=real)
