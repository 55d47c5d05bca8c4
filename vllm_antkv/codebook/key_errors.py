"""Quantisation errors of keys, which correct the logits of coded keys (`ops.reference.jensen_weights`)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class KeyErrors:
    """Errors and gains of all layers of a model.

    errors: (num_layers, num_kv_heads, head_size) float32, mean squared error of each channel of K before RoPE, in the
        model's order; both channels of a rotary pair have the same value.
    gain: (num_layers, num_heads) float32, factor of the correction, by query head.
    """

    errors: torch.Tensor
    gain: torch.Tensor

    def of_layers(self, coded: int, attending: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Errors of the layer that stores K, (num_kv_heads, head_size); gains of that which attends, (num_heads,)."""
        return self.errors[coded], self.gain[attending]
