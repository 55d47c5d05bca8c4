"""Attention of requests with a single new token: paged split-KV over codes, anchors and recent rows, merged by LSE.

Grid (num_reqs, num_kv_heads, num_splits): one program attends from all query heads of a KV head to one range of keys,
so that a decoded row serves the whole group; splits keep the GPU busy where requests are few and long. A second kernel,
grid (num_reqs, num_heads), merges the splits. Requests with more or no new tokens are left alone.
"""

import torch
import triton
import triton.language as tl

from .arguments import Batch, Pages, Rows, Shape, Tables
from .attention import attend_keys, query_pointers
from .common import LN2
from .tuning import autotuned

_CONFIGS = [
    triton.Config({"BLOCK_N": 64}, num_warps=8, num_stages=1),
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=1),
    # Three programs to a multiprocessor instead of two, which hide each other's look-ups.
    triton.Config({"BLOCK_N": 32}, num_warps=4, num_stages=1, maxnreg=168),
]


def decode(
    rows: Rows,
    output: torch.Tensor,
    lse: torch.Tensor | None,
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
        lse: (num_tokens, num_heads) float32, log-sum-exp of the scaled logits, written; or None.
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
        partial_lse if lse is None else lse,
        partial_output,
        partial_lse,
        batch,
        num_splits,
        shape,
        SPLITS_PAD=triton.next_power_of_2(num_splits),
        WRITES_LSE=lse is not None,
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
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(batch.query_start_loc + request)
    if tl.load(batch.query_start_loc + request + 1) - token != 1:
        return
    position = tl.load(batch.seq_lens + request) - 1
    tiles_per_split = tl.cdiv(tl.cdiv(position + 1, BLOCK_N), num_splits)
    begin = split * tiles_per_split * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, position + 1)

    # A matrix instruction has 16 rows, whatever the size of the group.
    in_group = tl.arange(0, shape.group_pad if shape.group_pad > 16 else 16)
    real = in_group < shape.group
    heads = head * shape.group + in_group
    maximum, total, weighted = attend_keys(
        query_pointers(rows, token + in_group * 0, heads, shape),
        tl.where(real, position, -1),
        position,
        position,
        begin,
        end,
        position,
        token,
        request,
        head,
        scale,
        rows,
        pages,
        tables,
        batch,
        shape,
        BLOCK_N,
    )
    slot = (request * shape.num_kv_heads * shape.group + heads).to(tl.int64) * num_splits + split
    # A split behind the end of the sequence has seen nothing: its LSE is -inf, and nobody reads its output.
    tl.store(partial_lse + slot, maximum + tl.log2(total), mask=real)
    channels = tl.arange(0, shape.head_pad)[None, :]
    tl.store(
        partial_output + slot[:, None] * shape.head_size + channels,
        weighted / total[:, None],
        mask=real[:, None] & (channels < shape.head_size),
    )


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    output: tl.tensor,
    output_stride: tl.tensor,
    lse: tl.tensor,
    partial_output: tl.tensor,
    partial_lse: tl.tensor,
    batch: Batch,
    num_splits: tl.tensor,
    shape: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    WRITES_LSE: tl.constexpr,
) -> None:
    """Merge the splits of one (request, query head). Their LSE is in powers of two, the result's natural."""
    num_heads: tl.constexpr = shape.num_kv_heads * shape.group
    request, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(batch.query_start_loc + request)
    if tl.load(batch.query_start_loc + request + 1) - token != 1:
        return
    split = tl.arange(0, SPLITS_PAD)
    slot = (request * num_heads + head).to(tl.int64) * num_splits + split
    statistics = tl.load(partial_lse + slot, mask=split < num_splits, other=float("-inf"))
    maximum = tl.max(statistics, 0)
    weights = tl.exp2(statistics - maximum)
    total = tl.sum(weights, 0)
    channels = tl.arange(0, shape.head_pad)
    real = channels < shape.head_size
    partial = tl.load(
        partial_output + slot[:, None] * shape.head_size + channels[None, :],
        mask=(statistics > float("-inf"))[:, None] & real[None, :],
        other=0.0,
    )
    merged = tl.sum(partial * weights[:, None], 0) / total
    row = output + token.to(tl.int64) * output_stride + head * shape.head_size
    tl.store(row + channels, merged.to(output.dtype.element_ty), mask=real)
    if WRITES_LSE:
        tl.store(lse + token.to(tl.int64) * num_heads + head, (maximum + tl.log2(total)) * LN2)
