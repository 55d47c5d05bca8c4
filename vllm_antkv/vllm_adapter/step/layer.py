"""The recency companion of an attention layer: how vLLM's allocator learns that recency pages exist."""

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend

from vllm_antkv.cache.pages import PageLayout, RecencyPages
from vllm_antkv.config import AntKVConfig
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec, recency_spec
from vllm_antkv.vllm_adapter.step.backend import RecencyBackend

_SUFFIX = ".antkv_recent"


def recency_layer_name(layer_name: str) -> str:
    """Name of an attention layer's companion."""
    return layer_name + _SUFFIX


class RecencyLayer(AttentionLayerBase):
    """Owns the recency pages of one attention layer. Not a module: it has no weights and no forward."""

    def __init__(
        self, layout: PageLayout, num_kv_heads: int, dtype: torch.dtype, settings: AntKVConfig, window: int | None
    ) -> None:
        self._layout = layout
        self._num_kv_heads = num_kv_heads
        self._dtype = dtype
        self._settings = settings
        self._window = window
        self.kv_cache: torch.Tensor = torch.tensor([])
        self.pages: RecencyPages | None = None

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the pages from vLLM and view them typed."""
        self.kv_cache = kv_cache
        self.pages = RecencyPages.view(kv_cache, self._layout, self._dtype)

    def let_pages_go(self) -> None:
        """See `pages.let_pages_go`."""
        self.kv_cache, self.pages = torch.tensor([]), None

    def get_attn_backend(self) -> type[AttentionBackend]:
        """How the pages are laid out."""
        return RecencyBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> RecencySpec:
        """How the pages are allocated."""
        return recency_spec(self._layout, self._num_kv_heads, self._settings, vllm_config, self._window)
