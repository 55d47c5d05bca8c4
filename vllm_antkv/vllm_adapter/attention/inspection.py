"""What a worker looks up in its layers when somebody asks: anchors from the pages, and samples of the attention.

Nothing here runs in an ordinary step. A sample takes the place of one layer's `forward` for one step, and then goes.
"""

from itertools import cycle, product
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from vllm_antkv.cache.pages import NO_ANCHOR, VQPages
from vllm_antkv.ops.attention_shares import attention_shares
from vllm_antkv.ops.counters import Counters, Report
from vllm_antkv.select.anchors import EXACT_ANCHOR
from vllm_antkv.vllm_adapter.attention.impl import AntKVImpl
from vllm_antkv.vllm_adapter.attention.metadata import VQMetadata


class Inspector:
    """Answers for the layers of one worker that have codes of their own, in the order of the model."""

    def __init__(self, vllm_config: VllmConfig, counters: Counters) -> None:
        context = vllm_config.compilation_config.static_forward_context
        self._layers = [each for each in context.values() if _has_codes(getattr(each, "impl", None))]
        self._counters = counters
        num_kv_heads = self._layers[0].impl.num_kv_heads
        self._turns = cycle(product(range(num_kv_heads), (layer.impl for layer in self._layers)))
        self._sample_is_due = False

    def report(self) -> Report:
        """What was counted so far. One decode step after this is sampled, in one layer and KV head; they take turns."""
        if not self._sample_is_due:
            self._sample_is_due = True
            self._sample(*next(self._turns))
        return self._counters.report()

    def anchor_offsets(self, block_ids: dict[str, list[int]]) -> list[list[list[list[list[int]]]]]:
        """Offsets in their blocks of the anchors of some VQ pages, NO_ANCHOR where a row is unused or another's.

        Args:
            block_ids: of each layer by its name, as many for all; 0, the null block, for what lies before a window.

        Returns:
            [layer][block][KV head of this worker][K, V][row].
        """
        return [self._anchor_offsets_of(layer, block_ids[layer.layer_name]) for layer in self._layers]

    def _anchor_offsets_of(self, layer: Any, block_ids: list[int]) -> list[list[list[list[int]]]]:
        attachment = layer.impl.attachment
        pages = VQPages.view(layer.kv_cache, attachment.layout)
        ids = torch.tensor(block_ids, device=layer.kv_cache.device)
        offsets = pages.anchor_offsets[ids]
        offsets = torch.where(offsets >= EXACT_ANCHOR, offsets - EXACT_ANCHOR, offsets)
        return torch.where((ids > 0)[:, None, None, None], offsets, NO_ANCHOR).tolist()

    def _sample(self, kv_head: int, impl: AntKVImpl) -> None:
        """Measure in the next step that only decodes, after its attention."""

        def forward(
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: VQMetadata | None,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            result = AntKVImpl.forward(impl, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)  # type: ignore[arg-type]
            if attn_metadata is not None and attn_metadata.max_query_len == 1:
                del impl.forward
                self._sample_is_due = False
                self._measure(kv_head, impl, query, key, attn_metadata)
            return result

        impl.forward = forward  # type: ignore[method-assign]

    def _measure(
        self, kv_head: int, impl: AntKVImpl, query: torch.Tensor, key: torch.Tensor, metadata: VQMetadata
    ) -> None:
        assert impl.attachment is not None
        assert impl._layer is not None
        step = metadata.step(get_forward_context().attn_metadata[impl.attachment.recency_name])
        last = metadata.num_tokens - 1
        query, key = query[last], key[last]
        if impl.attachment.scales is not None:
            query, key = query * impl.attachment.scales.query, key * impl.attachment.scales.key
        shares = attention_shares(impl._layer, query, key, step, kv_head)
        self._counters.count_attention(shares)


def _has_codes(impl: object) -> bool:
    return isinstance(impl, AntKVImpl) and impl.attachment is not None and impl.attachment.source is None
