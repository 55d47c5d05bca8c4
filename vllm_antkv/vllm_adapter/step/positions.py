"""The companion of all attention layers that owns the pages of positions (M-RoPE; see `cache.positions`)."""

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_antkv.cache.positions import store_positions, view_positions
from vllm_antkv.vllm_adapter.block_pool.specs import position_spec
from vllm_antkv.vllm_adapter.step.backend import RecencyBackend

_SUFFIX = ".antkv_positions"


def position_layer_name(layer_name: str) -> str:
    """Name of the companion beside the attention layer that writes its pages."""
    return layer_name + _SUFFIX


class PositionLayer(AttentionLayerBase):
    """Owns the positions of all tokens. Not a module: it has no weights and no forward.

    num_pages: in a block.
    of_step: (3, max_num_tokens) integer, the model runner's own, which has those of the tokens of every step.
    """

    def __init__(self, of_step: torch.Tensor, num_pages: int) -> None:
        self._of_step = of_step
        self._num_pages = num_pages
        self.kv_cache: torch.Tensor = torch.tensor([])
        self.pages: torch.Tensor | None = None

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the pages from vLLM and view them typed."""
        self.kv_cache = kv_cache
        self.pages = view_positions(kv_cache, self._num_pages)

    def let_pages_go(self) -> None:
        """See `pages.let_pages_go`."""
        self.kv_cache, self.pages = torch.tensor([]), None

    def get_attn_backend(self) -> type[AttentionBackend]:
        """How the pages are laid out: as those of recency, which have no attention of their own either."""
        return RecencyBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """How the pages are allocated: with the VQ pages of a block."""
        return position_spec(self._num_pages)

    def store(self, slots: torch.Tensor) -> None:
        """Write the positions of the step's tokens; slots: as in `store_positions`."""
        assert self.pages is not None
        store_positions(self.pages, slots, self._of_step[:, : len(slots)])
