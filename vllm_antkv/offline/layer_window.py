"""What the attention of one layer gets for whole windows."""

from dataclasses import dataclass
from typing import Self

import torch

from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.rope import RotaryTable


@dataclass(frozen=True)
class LayerWindow:
    """The rows of one layer.

    layer: its index.
    query: (num_windows, num_tokens, num_heads, head_size), after RoPE.
    key, value: (num_windows, num_tokens, num_kv_heads, head_size), keys after RoPE.
    rules: how logits come about.
    rotary: the table that rotated `key`.
    source: the layer whose K and V these are; None: its own.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rules: LogitRules
    rotary: RotaryTable
    source: Self | None = None

    @property
    def owner(self) -> "LayerWindow":
        """The layer whose centroids code the rows, and whose queries vote on them."""
        return self if self.source is None else self.source
