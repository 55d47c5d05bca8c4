"""Attention of prompts through a kernel for plain rows, FlashAttention's: see `varlen_plan` for which calls of it.

The kernel comes from vLLM and is handed in (`attention.flash_attention`); the pages it attends to are scratch memory.
Nothing here waits for the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.layer import LayerState, StepRows
from vllm_antkv.ops.step import Step
from vllm_antkv.ops.varlen_call import VarlenCall
from vllm_antkv.ops.varlen_plan import Call, Limits, Round, plan

#: Blocks of a past that are written as plain rows at a time: 16,384 tokens, 64 MiB for 8 KV heads of 128 channels.
PREFILL_CHUNK_BLOCKS = 128
#: Query heads per KV head from which the kernel's tiles of 128 rows are filled well enough: in smaller groups the early
#: queries of a block leave most of one empty.
MIN_GROUP = 3
#: Channels that plain rows have beyond a head's where the logits of coded keys are corrected: a query has what is added
#: to them, divided by their scale, in the first, and what its dtype rounds away of that in the second; K that is coded
#: and no anchor has 1 in both. All others are 0. A kernel takes multiples of 8.
BIAS_CHANNELS = 8


@dataclass(frozen=True, eq=False)
class DequantisedPages:
    """What pages are to hold, and the memory for them.

    page_requests: (num_pages, 3) int32: request, VQ block, and 1 for exact rows or 0 for what codes stand for.
    key, value: (capacity, VQ_BLOCK_SIZE, num_kv_heads, dequantised_size) model dtype; `num_pages` are written.
    """

    page_requests: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class DequantisedPageWriter(Protocol):
    """Writes pages from the step's rows and the cache: see `ops.varlen_plan`."""

    def __call__(self, rows: StepRows, pages: DequantisedPages, step: Step) -> None:
        """Write all rows of the pages; those that nobody sees, or that are gone, must be finite.

        Args:
            rows: of the step; no query is read.
            pages: what to write where.
            step: what is computed.
        """
        ...


#: Gives queries (n, num_heads, head_size) their `BIAS_CHANNELS`: writes (n, num_heads, dequantised_size), contiguous.
Extend = Callable[[torch.Tensor, torch.Tensor], None]
#: Adds what other keys gave: takes an output (n, num_heads, head_size) in the model's dtype and its log-sum-exp
#: (num_heads, n) float32, which are written, and the same two of the other keys. Infinite is "nothing seen".
Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def supports_varlen(layer: LayerState) -> bool:
    """Whether prompts of a layer are what the plan covers, and there is a kernel for them."""
    policy = layer.config.recency_policy
    sliding = policy.kind == "sliding" and policy.window <= VQ_BLOCK_SIZE
    fills = layer.kind.group >= MIN_GROUP
    ordinary = layer.rules.are_plain and layer.config.prefill_reads_cache
    has_kernel = layer.varlen is not None and dequantised_size(layer) <= layer.varlen.max_head_size
    return has_kernel and fills and sliding and ordinary


def dequantised_size(layer: LayerState) -> int:
    """Channels of plain rows of a layer."""
    return layer.recency.k.shape[-1] + (BIAS_CHANNELS if layer.jensen_weights.any() else 0)


class VarlenPrefill:
    """Attention of the requests that do not decode; rows of the others are overwritten with anything."""

    def __init__(self, layer: LayerState, write: DequantisedPageWriter, extend: Extend, merge: Merge) -> None:
        assert layer.varlen is not None
        self._layer, self._varlen = layer, layer.varlen
        self._write, self._extend, self._merge = write, extend, merge
        self._size = dequantised_size(layer)
        # The step's tokens lie in so many blocks of a request, beside a piece and the block before them.
        num_pages = PREFILL_CHUNK_BLOCKS + self._varlen.max_num_tokens // VQ_BLOCK_SIZE + 3
        window, longest_decode = layer.config.recency_policy.window, layer.recency.score_slots
        self._limits = Limits(window, PREFILL_CHUNK_BLOCKS, num_pages, longest_decode)
        self._scratch()

    def attend(self, rows: StepRows, output: torch.Tensor, step: Step) -> None:
        """See `LayerOperations.attend`."""
        key_pages, value_pages, other, total, *extended = self._scratch()
        query, head_size = rows.query, output.shape[-1]
        if extended:
            query = extended[0][: len(rows.query)]
            self._extend(rows.query, query)
        for current in self._rounds(step, output.device):
            new = slice(current.first_row, current.first_row + current.num_rows)
            self._write(rows, DequantisedPages(current.pages, key_pages, value_pages), step)
            for index, call in enumerate(current.calls):
                is_first = current.is_first and index == 0
                result = output[new] if is_first and not extended else other[: current.num_rows]
                statistics = self._varlen.attend(
                    query[new], key_pages, value_pages, result, call, self._layer.rules.scale
                )
                if not is_first:
                    self._merge(output[new], total[:, new], result[..., :head_size], statistics)
                    continue
                total[:, new] = statistics
                if extended:
                    output[new] = result[..., :head_size]

    def _scratch(self) -> list[torch.Tensor]:
        """K and V pages, an output beside the step's, the log-sum-exp of what was merged so far; extended queries."""
        layer, num_tokens = self._layer, self._varlen.max_num_tokens
        dtype, head_size = layer.recency.k.dtype, layer.recency.k.shape[-1]
        pages = (self._limits.num_pages, VQ_BLOCK_SIZE, layer.k_centroids.shape[0], self._size), dtype
        other = (num_tokens, layer.num_heads, self._size), dtype
        extended = [other] if self._size > head_size else []
        return layer.scratch(pages, pages, other, ((layer.num_heads, num_tokens), torch.float32), *extended)

    def _rounds(self, step: Step, device: torch.device) -> "list[_DeviceRound]":
        """Planned for the first layer of a step, and shared by the others."""
        if self._limits not in step.shared:
            step.shared[self._limits] = _on_device(step, self._limits, device)
        return step.shared[self._limits]


@dataclass(frozen=True, eq=False)
class _DeviceRound:
    """See `varlen_plan.Round`; pages as in `DequantisedPages.page_requests`."""

    first_row: int
    num_rows: int
    is_first: bool
    pages: torch.Tensor
    calls: list[VarlenCall]


def _on_device(step: Step, limits: Limits, device: torch.device) -> list[_DeviceRound]:
    assert step.query_start_loc_cpu is not None
    assert step.seq_lens_cpu is not None
    rounds = plan(step.query_start_loc_cpu.diff().tolist(), step.seq_lens_cpu.tolist(), limits)
    arrays = [array for current in rounds for array in _arrays(current)]
    # One copy for all, which nobody waits for.
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])) if arrays else torch.empty(0)
    if device.type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([array.size for array in arrays])
    tensors = iter([part.view(array.shape) for part, array in zip(parts, arrays, strict=True)])
    return [
        _DeviceRound(
            current.first_row,
            current.num_rows,
            current.is_first,
            next(tensors),
            [_device_call(call, tensors) for call in current.calls],
        )
        for current in rounds
    ]


def _arrays(current: Round) -> Iterator[np.ndarray]:
    """Everything of a round that the device is told, int32: its pages, and starts, keys and pages of each call."""
    yield np.array([(page.request, page.block, page.exact) for page in current.pages], dtype=np.int32)
    for call in current.calls:
        yield np.array([0, *accumulate(run.num_rows for run in call.runs)], dtype=np.int32)
        yield np.array([run.num_keys for run in call.runs], dtype=np.int32)
        pages = np.zeros((len(call.runs), max(len(run.pages) for run in call.runs)), dtype=np.int32)
        for row, run in zip(pages, call.runs, strict=True):
            row[: len(run.pages)] = run.pages
        yield pages


def _device_call(call: Call, tensors: Iterator[torch.Tensor]) -> VarlenCall:
    return VarlenCall(
        starts=next(tensors),
        num_keys=next(tensors),
        pages=next(tensors),
        max_rows=max(run.num_rows for run in call.runs),
        max_keys=max(run.num_keys for run in call.runs),
        causal=call.causal,
        window=call.window,
    )
