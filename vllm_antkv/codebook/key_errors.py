"""What coded keys lose, from which attention corrects their logits (`ops.reference.jensen_weights`)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class KeyErrors:
    """Of all layers of a model.

    errors: (num_layers, num_kv_heads, head_size) float32, mean squared error of each channel of K before RoPE, in the
        model's order; the two channels of a rotary pair have the same.
    gain: (num_layers, num_heads) float32, multiplies the correction of each query head.
    """

    errors: torch.Tensor
    gain: torch.Tensor

    def of_layers(self, coded: int, attending: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Errors of the layer whose K is coded, (num_kv_heads, head_size); gains of that whose queries attend."""
        return self.errors[coded], self.gain[attending]
