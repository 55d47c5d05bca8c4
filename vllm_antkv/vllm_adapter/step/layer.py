"""Companions of attention layers: how vLLM's allocator learns that there are pages beside those of codes."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.interfaces import supports_mrope
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_antkv.cache.pages import PageLayout, RecencyPages
from vllm_antkv.cache.positions import NUM_POSITIONS, store_positions, view_positions
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec, position_spec, recency_spec
from vllm_antkv.vllm_adapter.step.backend import RecencyBackend


def recency_layer_name(layer_name: str) -> str:
    """Name of an attention layer's companion."""
    return f"{layer_name}.antkv_recent"


def position_layer_name(layer_name: str) -> str:
    """Name of the companion beside the attention layer that writes its pages."""
    return f"{layer_name}.antkv_positions"


class _Companion(AttentionLayerBase):
    """Owns pages. Not a module: it has no weights and no forward.

    pages: typed, once vLLM has allocated them.
    """

    def __init__(self) -> None:
        self.let_pages_go()

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the pages from vLLM and view them typed."""
        self.kv_cache, self.pages = kv_cache, self._view(kv_cache)

    def let_pages_go(self) -> None:
        """See `pages.let_pages_go`."""
        self.kv_cache, self.pages = torch.tensor([]), None

    def get_attn_backend(self) -> type[AttentionBackend]:
        """How the pages are laid out."""
        return RecencyBackend

    def _view(self, kv_cache: torch.Tensor) -> Any:
        raise NotImplementedError


class RecencyLayer(_Companion):
    """Owns the recency pages of one attention layer."""

    pages: RecencyPages | None

    def __init__(
        self, layout: PageLayout, num_kv_heads: int, dtype: torch.dtype, settings: AntKVConfig, window: int | None
    ) -> None:
        super().__init__()
        self._layout, self._dtype = layout, dtype
        self._num_kv_heads, self._settings, self._window = num_kv_heads, settings, window

    def _view(self, kv_cache: torch.Tensor) -> RecencyPages:
        return RecencyPages.view(kv_cache, self._layout, self._dtype)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> RecencySpec:
        """How the pages are allocated."""
        return recency_spec(self._layout, self._num_kv_heads, self._settings, vllm_config, self._window)


class PositionLayer(_Companion):
    """Owns the positions of all tokens, of all layers of a model with M-RoPE (`cache.positions`).

    num_pages: in a block.
    of_step: (3, max_num_tokens) integer, as `positions_of_step` finds it.
    """

    pages: torch.Tensor | None

    def __init__(self, of_step: torch.Tensor, num_pages: int) -> None:
        super().__init__()
        self._of_step, self._num_pages = of_step, num_pages

    def _view(self, kv_cache: torch.Tensor) -> torch.Tensor:
        return view_positions(kv_cache, self._num_pages)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """How the pages are allocated: with the VQ pages of a block."""
        return position_spec(self._num_pages)

    def store(self, slots: torch.Tensor) -> None:
        """Write the positions of the step's tokens; slots: as in `store_positions`."""
        assert self.pages is not None
        store_positions(self.pages, slots, self._of_step[:, : len(slots)])


def positions_of_step(runner: Any) -> torch.Tensor:
    """Where a model runner, of either version, keeps the three positions of a step's tokens (M-RoPE).

    Attention metadata has one position per token at most, its place in the sequence. The runner computes the three
    before every step, into memory that stays where it is, so that CUDA graphs can read it.

    Returns:
        (3, at least max_num_batched_tokens) int64, on its device.

    Raises:
        UnsupportedModelError: it keeps them elsewhere, or in another shape, or vLLM has none for the loaded model.
    """
    model = runner.get_model()
    if not supports_mrope(model):
        # Otherwise an assertion of vLLM's would end the engine at the first request.
        raise UnsupportedModelError(
            f"The config of this model has M-RoPE (mrope_section), but vLLM does not know how {type(model).__name__} "
            "gives its tokens three positions, and serves it with no KV cache."
        )
    # Runner V1 has them itself, V2 in the state of the model.
    buffer = getattr(runner, "mrope_positions", None)
    state = getattr(getattr(runner, "model_state", None), "rope_state", None)
    positions = getattr(buffer, "gpu", None) if buffer is not None else getattr(state, "positions", None)
    if positions is None or positions.ndim != 2 or len(positions) != NUM_POSITIONS:
        raise UnsupportedModelError(
            f"vLLM's {type(runner).__name__} does not say by which three positions M-RoPE turns the tokens of a step: "
            "serve this model with --kv-cache-dtype auto."
        )
    return positions  # type: ignore[no-any-return]
