"""The trained intact prefix: K and V of a prompt's first tokens in place of the model's own (IntactKV, section 3.2).

Vectors are stored as the cache stores unquantised ones, K after RoPE: a prefix is always at positions 0 to P - 1, so
training knows its rotation, and serving only replaces vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TrainedPrefix:
    """K and V of every layer for prompts that start with P token ids.

    token_ids: the P ids.
    k, v: (num_layers, P, num_kv_heads, head_size) float32, K after RoPE.
    """

    token_ids: tuple[int, ...]
    k: torch.Tensor
    v: torch.Tensor


def starts_with(prompt: Sequence[int] | None, prefix: Sequence[int]) -> bool:
    """Whether a whole prompt starts with the prefix. None: a prompt without token ids."""
    return prompt is not None and len(prompt) >= len(prefix) and list(prompt[: len(prefix)]) == list(prefix)
