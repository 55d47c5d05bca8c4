"""What an attention layer's operations need beside the step, and the interface that every set of kernels has."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from vllm_antkv.cache.pages import RecencyPages, VQPages
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.ops.step import Step
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
        """Logits are mere products, of keys that turn by their place in the sequence."""
        return self.plain_logits and (self.rotary is None or self.rotary.sections is None)


@dataclass(frozen=True)
class LayerState:
    """One layer's pages, centroids and rotary table, and what a query sees exactly.

    k_centroids, v_centroids: (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size); float16 for kernels on
        GPUs, which read them as codebooks hold them, else float32, in which the others compute.
    k_order: (head_size,) int32, the channel of K that stands at each place of the rows that codes stand for; the pairs
        of RoPE stay pairs (`rope.interleaved`). None: channels as the model has them. Rows in full precision, in hand
        and in pages, are always in the model's order.
    rotary: for rows in `k_order`; None for a layer without RoPE.
    positions: where that has `sections`: the three positions of every token, with its place in the VQ pages,
        (num_blocks, VQ_BLOCK_SIZE, 3) int32. Everything else about a token goes by its place in the sequence.
    last_query: (max_model_len,) int32, the last query that sees each token exactly (`select.recency`).
    num_heads: query heads.
    rules: how its logits come about.
    counters: of this worker.
    counts_rows: this layer's anchors are the ones that are counted.
    max_num_reqs: the most requests of a step.
    scratch: see `Scratch`.
    varlen: attends to plain rows, where there is such a kernel.
    """

    vq: VQPages
    recency: RecencyPages
    k_centroids: torch.Tensor
    v_centroids: torch.Tensor
    preset: Preset
    k_order: torch.Tensor | None
    rotary: RotaryTable | None
    last_query: torch.Tensor
    config: AntKVConfig
    num_heads: int
    rules: LogitRules
    counters: Counters
    counts_rows: bool
    max_num_reqs: int
    scratch: Scratch
    varlen: Varlen | None = None
    positions: torch.Tensor | None = None

    @property
    def kind(self) -> LayerKind:
        """What decides which kernels have code for this layer."""
        num_kv_heads, num_sub_vectors, _, size = self.k_centroids.shape
        group = self.num_heads // num_kv_heads
        head_size, dtype = num_sub_vectors * size, self.recency.k.dtype
        return LayerKind(self.preset, head_size, group, dtype, self.rotary, self.rules.are_plain)

    @cached_property
    def half_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Half the squared norms of the centroids of K and V, (num_kv_heads, num_sub_vectors, num_centroids) float32.

        One pair of tensors, whichever kernels read them.
        """
        k, v = (centroids.half().float().square().sum(-1) / 2 for centroids in (self.k_centroids, self.v_centroids))
        return k, v

    def turned_by(self, block_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What `rotary` turns K of tokens by, as `RotaryTable.angles` takes it, and no more than it has.

        Of places that no token has, this is any position.

        block_ids, positions: (num_tokens,) integer, the tokens' VQ pages and places in the sequence.
        """
        assert self.rotary is not None
        if self.rotary.sections is not None:
            assert self.positions is not None
            positions = self.positions[block_ids, positions % VQ_BLOCK_SIZE]
        return positions.clamp(0, len(self.rotary.cos) - 1)

    @property
    def votes_on_prompt(self) -> bool:
        """Anchor Scores are the paper's: summed over the queries of the whole step, which must have attended before."""
        return self.config.anchor_scope == "prompt" and self.config.anchor_rows > 0

    def to_code_order(self, key: torch.Tensor) -> torch.Tensor:
        """K rows, (..., head_size), with their channels as sub-vectors take them."""
        return key if self.k_order is None else key.index_select(-1, self.k_order)

    def to_model_order(self, key: torch.Tensor) -> torch.Tensor:
        """Inverse of `to_code_order`."""
        return key if self.k_order is None else torch.empty_like(key).index_copy_(-1, self.k_order.long(), key)


class LayerOperations(Protocol):
    """The operations of one layer on its pages. `run` calls them in their order."""

    def encode_store(self, key: torch.Tensor, value: torch.Tensor, step: Step) -> None:
        """Write the codes of the step's tokens, and the full-precision rows of those that own a recency page.

        Args:
            key, value: (num_tokens, num_kv_heads, head_size) model dtype, K after RoPE.
            step: what is computed.
        """
        ...

    def anchor_score(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_sink: torch.Tensor | None,
        lse: torch.Tensor | None,
        step: Step,
    ) -> None:
        """Add the votes of the step's queries to the Anchor Scores; choose the anchors of the blocks that close.

        Args:
            query: (num_tokens, num_heads, head_size) model dtype.
            key, value: as stored.
            is_sink: (num_tokens,) bool, tokens to pin (KVSink), or None.
            lse: (num_tokens, num_heads) float32 of `attend`, for `anchor_scope: prompt`. None: a query's votes are its
                attention to the keys of its own block alone.
            step: what is computed.
        """
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        step: Step,
    ) -> None:
        """Attention of the step's queries to the cache and the tokens in hand.

        Args:
            query: (num_tokens, num_heads, head_size) model dtype.
            key, value: as stored.
            output: (num_tokens, num_heads, head_size), written.
            lse: (num_tokens, num_heads) float32, log-sum-exp of the logits, sinks included, written; or None.
            step: what is computed.
        """
        ...


class VotingBeside(LayerOperations, Protocol):
    """Operations that leave the votes of single tokens to whoever attends from them."""

    def score_longer(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_sink: torch.Tensor | None,
        step: Step,
    ) -> None:
        """`anchor_score` in scope `block` of the requests with several new tokens; the others' are left alone."""
        ...

    def close_blocks(self, key: torch.Tensor, value: torch.Tensor, step: Step) -> None:
        """Choose the anchors of blocks that the only new token of a request fills, from the scores in the pages."""
        ...


class StepRows(NamedTuple):
    """A step's rows of one layer; shapes as in `LayerOperations`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_sink: torch.Tensor | None


class InOneCall:
    """Operations that do in one call what `run` calls others for in turn."""

    def run(self, rows: StepRows, output: torch.Tensor, step: Step) -> None:
        """All that a layer does in a step."""
        raise NotImplementedError


def run(
    operations: LayerOperations,
    layer: LayerState,
    rows: StepRows,
    output: torch.Tensor,
    step: Step,
) -> None:
    """All that a layer does in a step. Shapes as in `LayerOperations`.

    Votes need nothing but the rows of a block, so that anchors are ready before any query attends, and a query sees
    the same anchors however its prompt was cut. Only the paper's votes (scope `prompt`) come from attention itself.
    """
    if isinstance(operations, InOneCall):
        return operations.run(rows, output, step)
    query, key, value, is_sink = rows
    counters = layer.counters
    with counters.timed("encode_store"):
        operations.encode_store(key, value, step)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if layer.votes_on_prompt else None
    if lse is not None:
        with counters.timed("attend"):
            operations.attend(query, key, value, output, lse, step)
    if layer.config.anchor_rows:
        with counters.timed("anchor_score"):
            operations.anchor_score(query, key, value, is_sink, lse, step)
    if lse is None:
        with counters.timed("attend"):
            operations.attend(query, key, value, output, None, step)
