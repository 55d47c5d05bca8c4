"""The trained intact prefix: K and V of a prompt's first tokens in place of the model's own (IntactKV, section 3.2).

Rows are as the cache holds exact ones, K after RoPE: a prefix always stands at positions 0 to P - 1, so its turn is
known when it is trained, and serving puts rows into the place of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TrainedPrefix:
    """Rows of every layer for prompts that start with P token ids.

    token_ids: the P ids.
    k, v: (num_layers, P, num_kv_heads, head_size) float32, K after RoPE.
    """

    token_ids: tuple[int, ...]
    k: torch.Tensor
    v: torch.Tensor


def starts_with(prompt: Sequence[int] | None, prefix: Sequence[int]) -> bool:
    """Whether a whole prompt starts with the prefix. None: a prompt that is not made of token ids."""
    return prompt is not None and len(prompt) >= len(prefix) and list(prompt[: len(prefix)]) == list(prefix)
