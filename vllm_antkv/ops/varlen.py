"""Attention of prompts through a kernel for plain rows, FlashAttention's: see `varlen_plan` for which calls of it.

The kernel comes from vLLM and is handed in; the pages it attends to are scratch memory. Nothing here waits for the
device.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.layer import LayerSetup, LayerState
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.ops.varlen_call import PrefillRound, RowsInPages, StepPages, VarlenCall
from vllm_antkv.ops.varlen_plan import Limits, plan

if TYPE_CHECKING:
    from vllm_antkv.triton_kernels.launch import Fixed

#: Blocks of a past that are written as plain rows at a time: 16,384 tokens, 64 MiB for 8 KV heads of 128 channels.
PREFILL_CHUNK_BLOCKS = 128
#: Channels that plain rows have beyond a head's where the logits of coded keys are corrected: a query has what is added
#: to them, divided by their scale, in the first, and what its dtype rounds away of that in the second; K that is coded
#: and no anchor has 1 in both. All others are 0. A kernel takes multiples of 8.
BIAS_CHANNELS = 8
#: Bytes, of parts of the scratch memory.
_ALIGNMENT = 256

#: Shape and dtype of a tensor.
_Part = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class PlainRows:
    """Memory for what the kernel reads; contiguous, model dtype.

    key, value: (capacity, VQ_BLOCK_SIZE, num_kv_heads, `dequantised_sizes`): pages.
    queries: (max_num_tokens, num_heads, size of K), where that is more than a head's; else None.
    """

    key: torch.Tensor
    value: torch.Tensor
    queries: torch.Tensor | None

    @cached_property
    def handed(self) -> "Fixed":
        """What Triton's kernels are handed: `triton_kernels.arguments.PlainRows`."""
        # Triton is imported only where it runs.
        from vllm_antkv.triton_kernels import arguments
        from vllm_antkv.triton_kernels.launch import Fixed

        return Fixed(arguments.PlainRows(self.key, self.value, self.key if self.queries is None else self.queries))


class DequantisedPageWriter(Protocol):
    """Writes plain rows from the step's rows and the cache."""

    def __call__(self, rows: StepRows, plain: PlainRows, pages: StepPages, extends: bool, step: StepPlan) -> None:
        """Write all rows of the pages: in full precision those that the first new token of the request sees so, others
        as their codes stand for, anchors corrected. Rows behind the end of a sequence must be finite.

        Args:
            rows: of the step.
            plain: where to.
            pages: which ones; the first of `plain`.
            extends: also write all queries of the step with their `BIAS_CHANNELS`.
            step: what is computed.
        """
        ...


class Attended(NamedTuple):
    """What calls gave, for some rows of a step.

    output: (n, num_heads, at least head_size) model dtype.
    lse: (num_heads, n) float32, natural log-sum-exp; infinite, of either sign, where nothing was seen.
    """

    output: torch.Tensor
    lse: torch.Tensor


class Merge(Protocol):
    """Adds what a call gave to what those before it did."""

    def __call__(self, so_far: Attended, added: Attended, is_first: bool) -> None:
        """Write `so_far`, whose output has a head's channels.

        is_first: `so_far` holds anything.
        """
        ...


def prefill_limits(layer: LayerSetup, score_slots: int) -> Limits | None:
    """What prompts are planned by: the same for all layers of a model that have any.

    None where the plan does not cover the layer's rules, or there is no kernel for it. score_slots: of its recency
    pages.
    """
    varlen, config = layer.varlen, layer.config
    # Else tokens of the block that is being filled are seen as codes, by its own queries without its anchors.
    keeps_own_block = config.recency_policy.kind != "none"
    ordinary = layer.rules.are_plain and keeps_own_block and not config.prefill_reads_cache
    if varlen is None or dequantised_sizes(layer)[0] > varlen.max_head_size or not ordinary:
        return None
    # The step's tokens lie in so many blocks of a request, beside a piece.
    num_pages = PREFILL_CHUNK_BLOCKS + varlen.max_num_tokens // VQ_BLOCK_SIZE + 2
    return Limits(PREFILL_CHUNK_BLOCKS, num_pages, score_slots)


def dequantised_sizes(layer: LayerSetup) -> tuple[int, int]:
    """Channels of plain rows of a layer: of K, and queries; of V, and what a kernel gives."""
    size = layer.head_size + (BIAS_CHANNELS if layer.jensen_weights.any() else 0)
    return size, layer.head_size if layer.varlen is not None and layer.varlen.narrow_values else size


def plan_rounds(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, limits: Limits, device: torch.device
) -> tuple[PrefillRound, ...]:
    """What computes attention of a step's requests that do not decode; nothing where none of them has a past.

    Args:
        query_start_loc: (num_reqs + 1,) int32 in the host's memory.
        seq_lens: (num_reqs,) int32 in the host's memory; may be upper bounds for requests that decode.
        limits: of the layers.
        device: that has the pages.
    """
    rounds = plan(query_start_loc.diff().tolist(), seq_lens.tolist(), limits)
    if not rounds:
        return ()
    arrays = [array for each in rounds for array in (each.pages, each.starts, each.num_keys, each.page_table)]
    # One copy for all, which nobody waits for.
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([array.size for array in arrays])
    tensors = iter([part.view(array.shape) for part, array in zip(parts, arrays, strict=True)])
    planned = []
    for each in rounds:
        pages, starts, keys = next(tensors), next(tensors), RowsInPages(next(tensors), next(tensors))
        call = VarlenCall(starts, keys, each.max_rows, each.max_keys, each.causal)
        planned.append(PrefillRound(each.first_row, each.num_rows, each.is_first, StepPages(pages), call))
    return tuple(planned)


class VarlenPrefill:
    """Attention of the requests that do not decode; rows of the others are overwritten with anything."""

    def __init__(self, layer: LayerState, write: DequantisedPageWriter, merge: Merge) -> None:
        assert layer.varlen is not None
        self._layer, self._varlen, self._scale = layer, layer.varlen, layer.rules.scale
        self._write, self._merge = write, merge
        self._sizes = dequantised_sizes(layer)
        # What a kernel gives has more channels than a head.
        self._is_wide = self._sizes[1] > layer.head_size
        limits = prefill_limits(layer, layer.recency.score_slots)
        assert limits is not None
        self._num_pages = limits.num_pages
        self._parts = self._parts_of_scratch()
        self._num_bytes = sum(map(_num_bytes, self._parts))
        self._address = -1
        self._views: tuple[PlainRows, torch.Tensor] | None = None
        # It is taken here, and never more than that.
        layer.scratch(((self._num_bytes,), torch.uint8))

    def attend(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> None:
        """See `LayerOperations.attend`; the step has `rounds`."""
        if not step.rounds:
            self._varlen.attend(rows.query, rows.key, rows.value, output, step.in_hand, self._scale)
            return
        plain, other = self._scratch()
        query = rows.query if plain.queries is None else plain.queries
        extends = plain.queries is not None
        lse = None
        for current in step.rounds:
            is_first = current.is_first
            self._write(rows, plain, current.pages, extends, step)
            extends = False
            so_far = _rows_of(current, output)
            result = so_far if is_first and not self._is_wide else other[: current.num_rows]
            queries = _rows_of(current, query)
            added = self._varlen.attend(queries, plain.key, plain.value, result, current.call, self._scale)
            # Rounds of a request follow each other, with the same rows.
            lse = added if is_first or lse is None else lse
            if not is_first or self._is_wide:
                self._merge(Attended(so_far, lse), Attended(result, added), is_first)

    def _scratch(self) -> tuple[PlainRows, torch.Tensor]:
        """Rows for the kernel, and an output beside the step's."""
        (memory,) = self._layer.scratch(((self._num_bytes,), torch.uint8))
        if memory.data_ptr() != self._address:
            # Once before the server is ready, and never again: views take longer than a launch.
            key, value, other, *queries = _views(memory, self._parts)
            self._views = PlainRows(key, value, queries[0] if queries else None), other
            self._address = memory.data_ptr()
        assert self._views is not None
        return self._views

    def _parts_of_scratch(self) -> list[_Part]:
        layer, num_tokens = self._layer, self._varlen.max_num_tokens
        dtype = layer.recency.k.dtype
        pages = [((self._num_pages, VQ_BLOCK_SIZE, layer.k_centroids.shape[0], size), dtype) for size in self._sizes]
        extended, other = (((num_tokens, layer.num_heads, size), dtype) for size in self._sizes)
        return [*pages, other, *([extended] if self._sizes[0] > layer.head_size else [])]


def _rows_of(current: PrefillRound, rows: torch.Tensor) -> torch.Tensor:
    """Its own among a step's: often all of them, and a slice takes longer than much else here."""
    if rows.shape[0] == current.num_rows:
        return rows
    return rows[current.first_row : current.first_row + current.num_rows]


def _views(memory: torch.Tensor, parts: list[_Part]) -> list[torch.Tensor]:
    """Of memory, (num_bytes,) uint8, side by side."""
    sizes = [_num_bytes(part) for part in parts]
    pieces = memory.split(sizes)
    return [
        piece[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for piece, (shape, dtype) in zip(pieces, parts, strict=True)
    ]


def _num_bytes(part: _Part) -> int:
    """Rounded up, so that what lies behind it is aligned."""
    shape, dtype = part
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
