"""What an attention layer runs in each step: store the new tokens, then attend. It plans and binds nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from vllm_antkv.cache.pages import PageLayout, VQPages
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops.dispatch import Kernels
from vllm_antkv.ops.layer import LayerOperations, LayerSetup, LayerState
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.ops.warm_up import warm_up
from vllm_antkv.vllm_adapter.step.metadata import VQMetadata
from vllm_antkv.vllm_adapter.step.sinks import SinkFlags


@dataclass(frozen=True)
class Attachment:
    """What a layer is given after the model is loaded.

    setup: see `LayerSetup`.
    layout: of its pages.
    source: the layer whose cache this one reads, its rows of the step included; None: it has its own.
    sinks: flags of the step's tokens, for layers after the one that reveals the sinks.
    recency_name: name of the companion layer, for its metadata.
    recency: the companion layer.
    positions: the companion of all layers of a model with M-RoPE; None for others.
    stores_positions: this layer writes those of a step, before any layer reads them.
    kernels: what runs the operations.
    """

    setup: LayerSetup
    layout: PageLayout
    source: "AntKVImpl | None"
    sinks: SinkFlags | None
    recency_name: str
    recency: Any
    positions: Any
    stores_positions: bool
    kernels: Kernels


class AntKVImpl(AttentionImpl[VQMetadata]):
    """Attention over coded and exact rows. `attachment` is set by `attach`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        refused = {"ALiBi": alibi_slopes is not None, f"{attn_type} attention": attn_type != AttentionType.DECODER}
        for feature, present in refused.items():
            if present:
                raise UnsupportedModelError(f"{kv_cache_dtype} does not support {feature}: serve this model with auto.")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self._window, self._soft_cap, self._sinks = sliding_window, logits_soft_cap or None, sinks
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attachment: Attachment | None = None
        #: Whether other layers read this one's cache.
        self.is_read = False
        #: Looks at steps when they are computed, where somebody asked. CUDA graphs do not call it.
        self.observer: Callable[[LayerState, StepRows, StepPlan], None] | None = None
        #: As vLLM gave them.
        self.pages: torch.Tensor | None = None
        #: Those of the last step, where other layers read this one's cache.
        self._rows: StepRows | None = None
        self._layer: LayerState | None = None
        self._operations: LayerOperations | None = None

    def logit_rules(self, max_model_len: int) -> LogitRules:
        """How the layer's logits come about, once the weights are loaded. A window that no request outgrows is none."""
        window = None if self._window is None or self._window >= max_model_len else self._window
        sinks = None if self._sinks is None else self._sinks.detach().float()
        return LogitRules(self.scale, window, self._soft_cap, sinks)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: VQMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's tokens and attend.

        Args:
            layer: the Attention layer; unused.
            query: (num_tokens, num_heads, head_size).
            key, value: (num_tokens, num_kv_heads, head_size), K after RoPE; None where another layer's cache is read.
            kv_cache: raw VQ pages, (num_blocks, num_kv_heads, 1, vq_page_bytes) uint8.
            attn_metadata: None in vLLM's warm-up runs, which need no result.
            output: (num_tokens, num_heads, head_size), written.
        """
        assert self.attachment is not None, "AntKVWorker did not load this model"
        if attn_metadata is None:
            return output.zero_()
        assert self._layer is not None, "vLLM has given this layer no pages"
        assert self._operations is not None
        num_tokens = attn_metadata.num_tokens
        if self.attachment.stores_positions:
            self.attachment.positions.store(attn_metadata.slot_mapping)
        step = attn_metadata.of_layer(get_forward_context().attn_metadata[self.attachment.recency_name])
        if self.attachment.source is not None:
            self._read(self.attachment.source, query[:num_tokens], output[:num_tokens], step)
            return output
        sinks = self.attachment.sinks
        is_sink = None if sinks is None else sinks.of_step(num_tokens)
        if is_sink is not None and self._layer.counts_rows:
            self._layer.counters.count_sinks(is_sink, step.query_start_loc[-1])
        rows, written = StepRows(query, key, value, is_sink), output
        if query.shape[0] != num_tokens:
            # Graphs are padded.
            rows = StepRows(query[:num_tokens], key[:num_tokens], value[:num_tokens], is_sink)
            written = output[:num_tokens]
        if self.is_read:
            self._rows = rows
        self._operations.run(rows, written, step)
        if self.observer is not None:
            self.observer(self._layer, rows, step)
        return output

    def _read(self, source: "AntKVImpl", query: torch.Tensor, output: torch.Tensor, step: StepPlan) -> None:
        """Attend to another layer's cache, which is as that layer left it: its codes, and anchors by its votes."""
        assert self._layer is not None
        assert self._operations is not None
        rows = source._rows
        assert rows is not None, "a layer reads the cache of one before it"
        with self._layer.counters.timed("attend"):
            self._operations.attend(replace(rows, query=query), output, step)

    def take_pages(self, kv_cache: torch.Tensor) -> None:
        """Take the layer's pages from vLLM; see `pages.take_pages`."""
        assert self.attachment is not None
        self.pages = kv_cache
        positions = None if self.attachment.positions is None else self.attachment.positions.pages
        vq, recency = VQPages.view(kv_cache, self.attachment.layout), self.attachment.recency.pages
        self._layer = LayerState.of(self.attachment.setup, vq, recency, positions)
        if self.attachment.kernels.on_gpu:
            warm_up(self.attachment.kernels.build, self._layer)
        self._operations = self.attachment.kernels.build(self._layer)

    def let_pages_go(self) -> None:
        """Those of a trial: nothing of the layer holds them any longer."""
        self.pages = self._layer = self._operations = self._rows = None
