"""vLLM's own attention on CPUs, for layers whose pages lie beside pages of ours in a block. Imported on CPUs only."""

from collections.abc import Callable
from functools import wraps

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout


def zeroing(layers: list[Attention], zero: Callable[[list[int]], None]) -> Callable[[list[int]], None]:
    """A model runner's `_zero_block_ids` that knows pages of such layers, whichever window they have.

    What was in a block may be NaN to them, and vLLM's kernels multiply rows that are not there by 0. On CPUs vLLM
    itself zeroes the pages of layers without a window alone, where they have a group of their own.
    """

    @wraps(zero)
    def zero_all(block_ids: list[int]) -> None:
        zero(block_ids)
        pages: list[torch.Tensor] = [layer.kv_cache for layer in layers]
        for each in pages:
            each[block_ids] = 0

    return zero_all


class PackedCPUBackend(CPUAttentionBackend):
    """Its kernels go from block to block by the stride of the pages, whatever lies between."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Block outermost, as pages of ours need it; a page is what it is in vLLM's own."""
        return (KVCacheLayout.BLHNC,)
