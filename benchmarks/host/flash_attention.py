"""A layer of `auto` on Hopper: vLLM's own backend, FlashAttention 3 on pages in the model's dtype."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from benchmarks.gpu.llama import HEAD_SIZE, SCALE
from benchmarks.host.hopper import on_hopper
from benchmarks.host.step import DEVICE, DTYPE, GROUP, NUM_BLOCKS
from vllm_antkv.ops.rows import StepRows


class FlashAttention:
    """See `antkv.AntKV`."""

    block_sizes: tuple[int, ...] = (16,)

    def __init__(self, vllm_config: VllmConfig, num_kv_heads: int) -> None:
        (block_size,) = self.block_sizes
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=HEAD_SIZE, dtype=DTYPE)
        with on_hopper():
            from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder

            self._impl = FlashAttentionImpl(GROUP * num_kv_heads, HEAD_SIZE, SCALE, num_kv_heads, None, None, "auto")
            self._builder = FlashAttentionMetadataBuilder(spec, [], vllm_config, DEVICE)
        shape = (NUM_BLOCKS, num_kv_heads, block_size, 2 * HEAD_SIZE)
        self._cache = torch.empty(shape, dtype=DTYPE, device=DEVICE)
        scale = torch.ones((), device=DEVICE)
        self._vllm_config = vllm_config
        self._layer: Any = SimpleNamespace(_q_scale=scale, _k_scale=scale, _v_scale=scale)

    def plan(self, batches: Sequence[CommonAttentionMetadata]) -> dict[str, Any]:
        """See `antkv.AntKV`."""
        (batch,) = batches
        return {"layer": self._builder.build(0, batch)}

    def context(self, metadata: dict[str, Any]) -> AbstractContextManager[None]:
        """See `antkv.AntKV`."""
        return set_forward_context(metadata, self._vllm_config)

    def run(self, rows: StepRows, output: torch.Tensor, metadata: dict[str, Any]) -> None:
        """See `antkv.AntKV`. VLLM stores K and V first, in a call of its own."""
        of_layer = metadata["layer"]
        self._impl.do_kv_cache_update(self._layer, rows.key, rows.value, self._cache, of_layer.slot_mapping)
        self._impl.forward(self._layer, rows.query, rows.key, rows.value, self._cache, of_layer, output)
