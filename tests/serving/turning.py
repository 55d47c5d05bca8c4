"""Three positions per token (M-RoPE) in models of transformers, for the evaluator, which goes by places in a window."""

import torch
from torch import nn


class Turning(nn.Module):
    """Takes the place of a rotary module with M-RoPE: turns by the positions of one sequence, and of what would follow.

    Whoever asks for as many places, from the first on, gets the same table as the model.
    """

    def __init__(self, rotary: nn.Module, positions: torch.Tensor) -> None:
        """positions: (3, num_tokens) integer."""
        super().__init__()
        self._rotary, self._positions = rotary, positions

    def forward(self, like: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of as many tokens as `position_ids`, (..., num_tokens), has."""
        num_tokens = position_ids.shape[-1]
        following = self._positions.max() + 1 + torch.arange(num_tokens).expand(3, -1)
        three = torch.cat((self._positions, following), dim=1)[:, None, :num_tokens]
        found: tuple[torch.Tensor, torch.Tensor] = self._rotary(like, three)
        return found
