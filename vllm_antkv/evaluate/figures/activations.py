"""Queries, keys and values of every layer of one window, in full precision, as the attention function is handed them.

A layer at a time, so that memory holds one layer of one window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from vllm_antkv.offline.hidden import captured_hidden
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.taps import replaced


@dataclass(frozen=True)
class LayerRows:
    """What one attention layer computes with, for one window.

    layer: index of the layer.
    query: (num_tokens, num_heads, head_size) float32, after RoPE.
    key, value: (num_tokens, num_kv_heads, head_size) float32, keys after RoPE.
    scale: multiplies the logits.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float

    def queries_of(self, kv_head: int) -> torch.Tensor:
        """The queries that share a KV head: (num_tokens, group_size, head_size)."""
        return self.query.unflatten(1, (self.key.shape[1], -1))[:, kv_head]


@torch.inference_mode()
def visit_layers(model: PreTrainedModel, window: torch.Tensor, visit: Callable[[LayerRows], None]) -> None:
    """Run one window, (num_tokens,) int64, in full precision and hand the rows of each layer to `visit`, in order."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (rows[0].transpose(0, 1).float() for rows in (query, key, value))
        visit(LayerRows(int(module.layer_idx), q, k, v, scaling))  # type: ignore[arg-type]
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None

    with replaced(model, attend):
        model.get_decoder()(window[None].to(model.device), use_cache=False)


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, window: torch.Tensor) -> torch.Tensor:
    """The hidden state after every decoder layer for one window: (num_layers, num_tokens, hidden_size) float32."""
    states: list[torch.Tensor] = []
    with captured_hidden(decoder_layers(model), lambda hidden: states.append(hidden.float().cpu())):
        model.get_decoder()(window[None].to(model.device), use_cache=False)
    return torch.stack(states)
