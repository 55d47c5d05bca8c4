"""Merging what two calls of a kernel for plain rows gave for the same queries.

Grid (num_rows // R, num_heads), R rows of a head.
"""

import torch
import triton
import triton.language as tl

from .launch import launch

_ROWS = 16


def merge_calls(
    output: torch.Tensor, lse: torch.Tensor, added: torch.Tensor, added_lse: torch.Tensor, is_first: bool
) -> None:
    """Add a call's result to what was merged so far.

    Args:
        output: (n, num_heads, head_size) model dtype, channels contiguous; written.
        lse: (num_heads, n) float32, natural log-sum-exp of `output`: infinite, of either sign, where nothing was seen;
            written.
        added: (n, num_heads, at least head_size) model dtype, channels contiguous.
        added_lse: as `lse`.
        is_first: `output` and `lse` hold anything.
    """
    num_rows, num_heads, head_size = output.shape
    launch(
        _merge_calls_kernel,
        (-(-num_rows // _ROWS), num_heads),
        output,
        output.stride(0),
        output.stride(1),
        lse,
        lse.stride(0),
        added,
        added.stride(0),
        added.stride(1),
        added_lse,
        added_lse.stride(0),
        num_rows,
        0 if is_first else num_rows,
        HEAD_SIZE=head_size,
        HEAD_PAD=triton.next_power_of_2(head_size),
        ROWS=_ROWS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["lse_stride", "added_lse_stride", "num_rows", "num_merged"])
def _merge_calls_kernel(
    output: tl.tensor,
    output_stride: tl.tensor,
    head_stride: tl.tensor,
    lse: tl.tensor,
    lse_stride: tl.tensor,
    added: tl.tensor,
    added_stride: tl.tensor,
    added_head_stride: tl.tensor,
    added_lse: tl.tensor,
    added_lse_stride: tl.tensor,
    num_rows: tl.tensor,
    num_merged: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """ROWS rows of one query head. num_merged: rows that hold something; all or none."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    real, is_merged = row < num_rows, row < num_merged
    channels = tl.arange(0, HEAD_PAD)[None, :]
    in_head = channels < HEAD_SIZE
    theirs = _seen(added_lse + head * added_lse_stride + row, real)
    ours = _seen(lse + head * lse_stride + row, is_merged)
    maximum = tl.maximum(theirs, ours)
    subtracted = tl.where(maximum == float("-inf"), 0.0, maximum)
    our_weight, weight = tl.exp(ours - subtracted), tl.exp(theirs - subtracted)
    total = our_weight + weight
    at = output + (row * output_stride + head * head_stride)[:, None] + channels
    at_added = added + (row * added_stride + head * added_head_stride)[:, None] + channels
    so_far = tl.load(at, mask=is_merged[:, None] & in_head, other=0).to(tl.float32)
    result = tl.load(at_added, mask=real[:, None] & in_head, other=0).to(tl.float32)
    mean = tl.where(total > 0, 1.0 / total, 0.0)
    merged = (so_far * our_weight[:, None] + result * weight[:, None]) * mean[:, None]
    tl.store(at, merged.to(output.dtype.element_ty), mask=real[:, None] & in_head)
    tl.store(lse + head * lse_stride + row, subtracted + tl.log(total), mask=real)


@triton.jit
def _seen(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Log-sum-exps of which those of nothing are -inf: some kernels call it inf."""
    lse = tl.load(pointers, mask=mask, other=float("-inf"))
    return tl.where(lse == float("inf"), float("-inf"), lse)
