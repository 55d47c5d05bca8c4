"""What a worker looks up in its layers when somebody asks: anchors from the pages, and samples of the attention.

Nothing here runs in an ordinary step. One layer has an observer until a sample is taken.
"""

from itertools import cycle, product
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_antkv.cache.pages import NO_ANCHOR, VQPages
from vllm_antkv.ops.attention_shares import attention_shares
from vllm_antkv.ops.counters import Counters, Report
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.select.anchors import EXACT_ANCHOR
from vllm_antkv.vllm_adapter.step.impl import AntKVImpl


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
        """What was counted so far. One query after this is sampled, in one layer and KV head; they take turns."""
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
        """Measure the last query of the next step in which Python attends: it may be a prompt's."""

        def measure(layer: LayerState, rows: StepRows, step: StepPlan) -> None:
            num_new = _num_new_tokens_of_last(step)
            # Queries of a prompt may not see the tokens of their step as later ones will.
            is_prompt = num_new > layer.recency.score_slots and not layer.config.prefill_reads_cache
            if num_new == 0 or is_prompt:
                return
            impl.observer = None
            self._sample_is_due = False
            shares = attention_shares(layer, rows.query[-1], rows.key[-num_new:], step, kv_head)
            self._counters.count_attention(shares)

        impl.observer = measure


def _num_new_tokens_of_last(step: StepPlan) -> int:
    """Of the step's last request; 0 where it fills up a graph."""
    assert step.query_start_loc_cpu is not None
    return int(step.query_start_loc_cpu[-1] - step.query_start_loc_cpu[-2])


def _has_codes(impl: object) -> bool:
    return isinstance(impl, AntKVImpl) and impl.attachment is not None and impl.attachment.source is None
