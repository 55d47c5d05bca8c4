"""Attention of requests with a single new token: paged split-KV over codes, anchors and recent rows, merged by LSE.

Grid (num_reqs, num_kv_heads, num_splits): one program attends from all query heads of a KV head to one range of keys,
so that a decoded row serves the whole group; splits keep the GPU busy where requests are few and long. A second kernel,
grid (num_reqs, num_heads), merges the splits. Requests with more or no new tokens are left alone.
"""

import torch
import triton
import triton.language as tl

from .arguments import Batch, Pages, Queries, Request, Rows, Shape, Tables
from .attention import attend_tile, coded_bias, nothing_seen, query_pointers
from .coded_past import attend_past
from .common import LOG2E, load_halves
from .tuning import autotuned

#: Splits that a merging program reads at a time.
_MERGED_TOGETHER = tl.constexpr(16)
_CONFIGS = [
    triton.Config({"BLOCK_N": 64}, num_warps=8, num_stages=1),
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=1),
    triton.Config({"BLOCK_N": 128}, num_warps=8, num_stages=1),
]


def decode(
    rows: Rows,
    output: torch.Tensor,
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    pages: Pages,
    tables: Tables,
    batch: Batch,
    shape: Shape,
    scale: float,
) -> None:
    """Attend from the requests that have one new token.

    Args:
        output: (num_tokens, num_heads, head_size) model dtype, heads contiguous; written.
        partial_output: (num_reqs, num_heads, num_splits, head_size) float32 scratch; its shape sets the splits.
        partial_lse: (num_reqs, num_heads, num_splits) float32 scratch.
        scale: multiplies the logits.
    """
    num_reqs, num_heads, num_splits = partial_lse.shape
    _decode_kernel[(num_reqs, shape.num_kv_heads, num_splits)](
        rows, partial_output, partial_lse, pages, tables, batch, num_splits, scale, shape
    )
    _merge_kernel[(num_reqs, num_heads)](
        output,
        output.stride(0),
        partial_output,
        partial_lse,
        tables.sinks,
        batch,
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
    pages: Pages,
    tables: Tables,
    batch: Batch,
    num_splits: tl.tensor,
    scale: tl.tensor,
    shape: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One split of one (request, KV head)."""
    index, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(batch.query_start_loc + index)
    if tl.load(batch.query_start_loc + index + 1) - token != 1:
        return
    position = tl.load(batch.seq_lens + index) - 1
    first_block = 0
    if shape.window > 0:
        first_block = tl.maximum(position - shape.window + 1, 0) // shape.block_size
    blocks_per_split = tl.cdiv(tl.cdiv(position + 1, shape.block_size) - first_block, num_splits)
    begin = (first_block + split * blocks_per_split) * shape.block_size
    end = tl.minimum(begin + blocks_per_split * shape.block_size, position + 1)

    # A matrix instruction has 16 rows, whatever the size of the group.
    in_group = tl.arange(0, shape.group_pad if shape.group_pad > 16 else 16)
    real = in_group < shape.group
    heads = head * shape.group + in_group
    at = query_pointers(rows, token + in_group * 0, heads, shape)
    request = Request(index, position, token, head)
    bias = coded_bias(at, heads, real, tables, shape) * LOG2E
    softmax = nothing_seen(in_group, shape)
    past_begin, past_end = coded_past(begin, end, position, shape, BLOCK_N)
    if past_begin < past_end:
        softmax = attend_past(
            at, real, past_begin, past_end, request, scale, bias, softmax, pages, tables, batch, shape, BLOCK_N
        )
    first, second = load_halves(at, real, tables, True, shape)
    queries = Queries(at, first, second, tl.where(real, position, -1), position, position, scale, bias)
    for other in range(begin, end - (past_end - past_begin), BLOCK_N):
        tile = tl.where(other < past_begin, other, other + (past_end - past_begin))
        softmax = attend_tile(queries, tile, request, softmax, rows, pages, tables, batch, shape, BLOCK_N)
    slot = (index * shape.num_kv_heads * shape.group + heads).to(tl.int64) * num_splits + split
    # A split behind the end of the sequence has seen nothing: its LSE is -inf, and nobody reads its output.
    tl.store(partial_lse + slot, softmax.maximum + tl.log2(softmax.total), mask=real)
    channels = tl.arange(0, shape.head_pad)[None, :]
    tl.store(
        partial_output + slot[:, None] * shape.head_size + channels,
        softmax.weighted / softmax.total[:, None],
        mask=real[:, None] & (channels < shape.head_size),
    )


@triton.jit
def coded_past(
    begin: tl.tensor, end: tl.tensor, position: tl.tensor, shape: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The whole tiles between `begin` and `end` of which the query at `position` sees codes and anchors alone."""
    if not shape.composes:
        return begin, begin
    closed = position // shape.block_size * shape.block_size
    past_end = tl.minimum(tl.minimum(position - shape.exact_reach, closed), end) // BLOCK_N * BLOCK_N
    past_begin = tl.maximum(tl.cdiv(shape.exact_prefix, BLOCK_N) * BLOCK_N, begin)
    if shape.window > 0:
        past_begin = tl.maximum(tl.cdiv(tl.maximum(position - shape.window + 1, 0), BLOCK_N) * BLOCK_N, past_begin)
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
    """Merge the splits of one (request, query head). Their LSE is in powers of two."""
    num_heads: tl.constexpr = shape.num_kv_heads * shape.group
    request, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(batch.query_start_loc + request)
    if tl.load(batch.query_start_loc + request + 1) - token != 1:
        return
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
        slot = (request * num_heads + head).to(tl.int64) * num_splits + split
        statistics = tl.load(partial_lse + slot, mask=split < num_splits, other=float("-inf"))
        # The first split has seen keys: there is a maximum from the first turn on.
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
