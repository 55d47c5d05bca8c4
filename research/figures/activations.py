"""Queries, keys and values of every layer of one window, in full precision, as the attention function is handed them.

A layer at a time, so that memory holds one layer of one window.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from vllm_antkv.offline.capture_attention import layer_of, replaced
from vllm_antkv.offline.hidden import captured_hidden
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.ops.logits import LogitRules


@dataclass(frozen=True)
class OneHead:
    """One query head of a layer.

    query, key: (num_tokens, head_size) float32.
    visible: (num_tokens, num_tokens) bool.
    rules: of this head alone.
    """

    query: torch.Tensor
    key: torch.Tensor
    visible: torch.Tensor
    rules: LogitRules

    @cached_property
    def attention(self) -> torch.Tensor:
        """(num_tokens, num_tokens); a row sums to 1, or to less where a learned sink takes part."""
        logits = self.logits(self.key).masked_fill(~self.visible, -torch.inf)
        return torch.exp(logits - self.rules.lse(logits[None, None])[0, 0, :, None])

    def logits(self, key: torch.Tensor) -> torch.Tensor:
        """With these keys, (num_tokens, head_size), nothing masked: (num_tokens, num_tokens)."""
        return self.rules.logits(self.query @ key.T)


@dataclass(frozen=True)
class LayerRows:
    """What one attention layer computes with, for one window.

    layer: index of the layer.
    query: (num_tokens, num_heads, head_size) float32, after RoPE.
    key, value: (num_tokens, num_kv_heads, head_size) float32, keys after RoPE.
    rules: how logits come about.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rules: LogitRules

    @property
    def visible(self) -> torch.Tensor:
        """(num_tokens, num_tokens) bool, True where query i sees row j."""
        positions = torch.arange(len(self.key), device=self.key.device)
        return self.rules.visible(positions[:, None], positions)

    @property
    def sees_all(self) -> bool:
        """Whether every query sees all tokens before it."""
        return self.rules.window is None or self.rules.window >= len(self.key)

    def heads_of(self, kv_head: int) -> Iterator[OneHead]:
        """The query heads that share a KV head."""
        size = self.query.shape[1] // self.key.shape[1]
        for head in range(kv_head * size, (kv_head + 1) * size):
            rules = self._rules_of(slice(head, head + 1))
            yield OneHead(self.query[:, head], self.key[:, kv_head], self.visible, rules)

    def group(self, kv_head: int) -> tuple[torch.Tensor, torch.Tensor, LogitRules]:
        """Queries that share a KV head and its key, as a batch of one, and how their logits come about.

        Returns:
            (1, num_tokens, group_size, head_size), (1, num_tokens, 1, head_size), rules.
        """
        size = self.query.shape[1] // self.key.shape[1]
        heads = slice(kv_head * size, (kv_head + 1) * size)
        return self.query[None, :, heads], self.key[None, :, kv_head : kv_head + 1], self._rules_of(heads)

    def outputs(self) -> torch.Tensor:
        """Of attention in full precision: (num_tokens, num_heads, head_size)."""
        heads = [
            head.attention @ self.value[:, kv_head]
            for kv_head in range(self.key.shape[1])
            for head in self.heads_of(kv_head)
        ]
        return torch.stack(heads, dim=1)

    def _rules_of(self, heads: slice) -> LogitRules:
        return self.rules if self.rules.sinks is None else replace(self.rules, sinks=self.rules.sinks[heads])


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
        rules = LogitRules(scaling, kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux"))
        rows = LayerRows(layer_of(module), q, k, v, rules)
        visit(rows)
        if not rules.are_plain:
            return rows.outputs()[None].to(query.dtype), None
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
