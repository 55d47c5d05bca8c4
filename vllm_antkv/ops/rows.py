"""A step's rows of one layer, and how kernels are handed them."""

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_antkv.ops.c_structs import HEADER, fields

if TYPE_CHECKING:
    from vllm_antkv.triton_kernels.arguments import Rows
    from vllm_antkv.triton_kernels.launch import Fixed


class RowsArgument(ctypes.Structure):
    """antkv_rows of csrc/cpu/antkv.h, Rows of csrc/cuda/layer.cuh."""

    _fields_: ClassVar = fields(HEADER, "antkv_rows")


@dataclass(frozen=True, eq=False)
class StepRows:
    """A step's rows of one layer.

    query: (num_tokens, num_heads, head_size) model dtype.
    key, value: (num_tokens, num_kv_heads, head_size) model dtype, K after RoPE.
    is_sink: (num_tokens,) bool, tokens to pin (KVSink), or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_sink: torch.Tensor | None

    @cached_property
    def arguments(self) -> tuple[RowsArgument, RowsArgument, RowsArgument]:
        """What C++ and CUDA are handed of query, key and value; ValueError as `rows_argument` raises it."""
        return rows_argument(self.query), rows_argument(self.key), rows_argument(self.value)

    @cached_property
    def handed(self) -> "Fixed":
        """What Triton's kernels are handed: `triton_kernels.arguments.Rows`; ValueError likewise."""
        rows, fixed = _triton()
        query, key, value = self.arguments
        at, key_at, value_at = self.query.data_ptr(), self.key.data_ptr(), self.value.data_ptr()
        stride, key_stride, value_stride = query.stride, key.stride, value.stride
        return fixed(
            rows(self.query, stride, self.key, key_stride, self.value, value_stride),
            (at, stride, key_at, key_stride, value_at, value_stride),
            # Triton compiles by these, or what is divisible in them.
            (self.query.dtype, at & 15, key_at & 15, value_at & 15, stride, key_stride, value_stride),
        )


def rows_argument(rows: torch.Tensor) -> RowsArgument:
    """(num_tokens, heads, head_size) whose heads lie side by side, as they come from one projection.

    Raises:
        ValueError: they do not; the kernels would read other rows.
    """
    return RowsArgument(rows.data_ptr(), token_stride(rows))


def token_stride(rows: torch.Tensor) -> int:
    """Entries from token to token of (num_tokens, heads, head_size); ValueError as `rows_argument` raises it."""
    _, num_heads, head_size = rows.shape
    of_token, of_head, of_channel = rows.stride()
    if of_channel != 1 or (of_head != head_size and num_heads > 1):
        raise ValueError(f"The heads of a token must be contiguous, not of strides {rows.stride()}.")
    return of_token


@cache
def _triton() -> "tuple[type[Rows], type[Fixed]]":
    """Triton is imported only where it runs."""
    from vllm_antkv.triton_kernels.arguments import Rows
    from vllm_antkv.triton_kernels.launch import Fixed

    return Rows, Fixed
