"""What an attention layer's operations need beside the step, and the interface that every set of kernels has."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol

import torch

from vllm_antkv.cache.pages import RecencyPages, VQPages
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.ops.varlen_call import Varlen
from vllm_antkv.presets import Preset

#: Memory for a call of the kernels, takes (shape, dtype) pairs, gives tensors that hold anything.
#: All layers get the same memory, and never more than was taken once before the server was ready.
Scratch = Callable[..., list[torch.Tensor]]


@dataclass(frozen=True)
class LayerKind:
    """What decides which kernels have code for a layer.

    group: query heads per KV head.
    rotary: None for a layer without RoPE.
    plain_logits: `LogitRules.are_plain`.
    """

    preset: Preset
    head_size: int
    group: int
    dtype: torch.dtype
    rotary: RotaryTable | None
    plain_logits: bool = True

    @property
    def is_plain(self) -> bool:
        """Logits are mere products, of keys that rotate by their place in the sequence."""
        return self.plain_logits and (self.rotary is None or self.rotary.sections is None)


@dataclass(frozen=True, kw_only=True)
class LayerSetup:
    """What is known of a layer once the model is loaded.

    k_centroids, v_centroids: (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) of this rank's KV heads;
        float16 for kernels on GPUs, which read them as codebooks hold them, else float32, in which the others compute.
    k_order: (head_size,) int32, the channel of K that stands at each place of the rows that codes stand for; the pairs
        of RoPE stay pairs (`rope.interleaved`). None: channels as the model has them. Rows in full precision, in hand
        and in pages, are always in the model's order.
    rotary: for rows in `k_order`; None for a layer without RoPE.
    jensen_weights: (num_heads, head_size) float32, channels in the model's order, see `reference.jensen_bias`; zeros
        switch the correction off.
    last_query: (max_model_len,) int32, the last query that sees each token exactly (`select.recency`).
    num_heads: query heads.
    rules: how its logits come about.
    counters: of this worker.
    counts_rows: this layer's anchors are the ones that are counted.
    max_num_reqs: the most requests of a step.
    scratch: see `Scratch`.
    varlen: attends to plain rows, where there is such a kernel.
    """

    config: AntKVConfig
    preset: Preset
    k_centroids: torch.Tensor
    v_centroids: torch.Tensor
    k_order: torch.Tensor | None
    rotary: RotaryTable | None
    jensen_weights: torch.Tensor
    last_query: torch.Tensor
    num_heads: int
    rules: LogitRules
    counters: Counters
    counts_rows: bool
    max_num_reqs: int
    scratch: Scratch
    varlen: Varlen | None = None

    @property
    def head_size(self) -> int:
        """Channels of a row."""
        _, num_sub_vectors, _, size = self.k_centroids.shape
        return num_sub_vectors * size

    @cached_property
    def half_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Half the squared norms of the centroids of K and V, (num_kv_heads, num_sub_vectors, num_centroids) float32.

        One pair of tensors, whichever kernels read them.
        """
        k, v = (centroids.half().float().square().sum(-1) / 2 for centroids in (self.k_centroids, self.v_centroids))
        return k, v

    def to_code_order(self, key: torch.Tensor) -> torch.Tensor:
        """K rows, (..., head_size), with their channels as sub-vectors take them."""
        return key if self.k_order is None else key.index_select(-1, self.k_order)

    def to_model_order(self, key: torch.Tensor) -> torch.Tensor:
        """Inverse of `to_code_order`."""
        return key if self.k_order is None else torch.empty_like(key).index_copy_(-1, self.k_order.long(), key)


@dataclass(frozen=True, kw_only=True)
class LayerState(LayerSetup):
    """A layer's setup and its pages, which vLLM hands over later.

    positions: where `rotary` has `sections`, the three positions of every token, at its place in the VQ pages:
        (num_blocks, VQ_BLOCK_SIZE, 3) int32. Everything else about a token goes by its place in the sequence.
    """

    vq: VQPages
    recency: RecencyPages
    positions: torch.Tensor | None = None

    @classmethod
    def of(
        cls, setup: LayerSetup, vq: VQPages, recency: RecencyPages, positions: torch.Tensor | None = None
    ) -> "LayerState":
        """`setup` with these pages."""
        known = {field.name: getattr(setup, field.name) for field in fields(LayerSetup)}
        return cls(**known, vq=vq, recency=recency, positions=positions)

    @property
    def kind(self) -> LayerKind:
        """What decides which kernels have code for this layer."""
        group, dtype = self.num_heads // len(self.k_centroids), self.recency.k.dtype
        return LayerKind(self.preset, self.head_size, group, dtype, self.rotary, self.rules.are_plain)

    def rope_positions(self, block_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What `rotary` rotates K of tokens by, as `RotaryTable.angles` takes it.

        Places behind the last token of a sequence get any position that the table has.

        block_ids, positions: (num_tokens,) integer, the tokens' VQ pages and places in the sequence.
        """
        assert self.rotary is not None
        if self.rotary.sections is not None:
            assert self.positions is not None
            positions = self.positions[block_ids, positions % VQ_BLOCK_SIZE]
        return positions.clamp(0, len(self.rotary.cos) - 1)


class LayerOperations(Protocol):
    """What a layer does in a step.

    Votes need nothing but the rows of a block, so that anchors are ready before any query attends, and a query sees the
    same anchors however its prompt was cut.
    """

    def run(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> None:
        """Store the step's tokens, count its votes, choose the anchors of blocks that close, and attend.

        output: (num_tokens, num_heads, head_size) model dtype, written.
        """
        ...

    def attend(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> None:
        """Attend alone, to a cache that another layer has filled with `rows` of K and V in this step."""
        ...
