"""The scales of K's channels in a worker; what they are for: `codebook.key_scales`."""

from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention

from vllm_antkv.codebook.key_scales import query_scales


def scale_rows(layer: Attention, k_scale: torch.Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Let a layer multiply queries and K by their scales: exactly, as these are powers of two.

    In `Attention.forward`, and not in its implementation: there torch.compile can make it part of what computes RoPE.
    In eager mode it takes two kernels. Not in a hook: some models call `forward` itself.

    Args:
        layer: after the model is loaded, before it is compiled.
        k_scale: (num_kv_heads, head_size), of the K that it reads; this rank's KV heads.
        dtype: of the model.
    """
    # Buffers, since vLLM puts a sleeping model's aside.
    layer.register_buffer("antkv_query_scale", query_scales(k_scale, layer.num_heads).to(device, dtype), False)
    layer.register_buffer("antkv_key_scale", k_scale.to(device, dtype), False)
    layer.forward = MethodType(_forward, layer)


def _forward(
    self: Any, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, *rest: Any, **options: Any
) -> torch.Tensor:
    """As `Attention.forward`. key: None where another layer's cache is read."""
    query = query.view(-1, self.num_heads, self.head_size) * self.antkv_query_scale
    if key is not None:
        key = key.view(-1, self.num_kv_heads, self.head_size) * self.antkv_key_scale
    return type(self).forward(self, query, key, value, *rest, **options)
