"""The trained prefix in a worker: its rows take the place of the model's in a step (IntactKV, section 3.2).

Which tokens of a step they are for is told before the layers run (`hooks.prefix_tokens`). Steps without such a token,
all steps of decoding among them, do nothing here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_CONTEXT_NAME = "antkv.prefix"


class PrefixTokens:
    """Which of the step's tokens get a row of the trained prefix; shared by all layers of a worker.

    token_ids: P ids. A request whose prompt starts with them has the trained rows at positions 0 to P - 1, wherever its
        prompt is cut into steps.
    """

    def __init__(self, token_ids: Sequence[int], device: torch.device) -> None:
        self.token_ids = list(token_ids)
        self._device = device
        self.places: tuple[torch.Tensor, torch.Tensor] | None = None

    def choose(self, has_prefix: np.ndarray, num_computed: np.ndarray, num_new: np.ndarray) -> bool:
        """Set `places` for a step, and say whether it has any.

        places: the tokens of the step and their positions in the prompt, each (num_prefix_tokens,) int64; or None.

        Args:
            has_prefix: (num_reqs,) bool, requests whose prompts start with the prefix, in the order of the step.
            num_computed: (num_reqs,) their tokens before the step.
            num_new: (num_reqs,) their tokens of the step.
        """
        stop = np.where(has_prefix, np.minimum(num_computed + num_new, len(self.token_ids)), 0)
        requests = np.flatnonzero(num_computed < stop)
        if not len(requests):
            self.places = None
            return False
        first_token = np.cumsum(num_new) - num_new
        positions = [np.arange(num_computed[request], stop[request]) for request in requests]
        tokens = [p + first_token[r] - num_computed[r] for p, r in zip(positions, requests, strict=True)]
        self.places = (self._on_device(tokens), self._on_device(positions))
        return True

    def clear(self) -> None:
        """No token of the step gets a trained row."""
        self.places = None

    def _on_device(self, parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(self._device, non_blocking=True)


@dataclass(frozen=True)
class LayerPrefix:
    """The rows of one layer.

    k, v: (P, num_kv_heads, head_size) model dtype, this rank's KV heads; K after RoPE, channels as the model has them.
    """

    tokens: PrefixTokens
    k: torch.Tensor
    v: torch.Tensor

    def put_in(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a step, each (num_tokens, num_kv_heads, head_size), with the trained rows in their places."""
        if self.tokens.places is None:
            return key, value
        tokens, positions = self.tokens.places
        return key.index_copy(0, tokens, self.k[positions]), value.index_copy(0, tokens, self.v[positions])


def set_prefix_tokens(static_forward_context: dict[str, Any], tokens: PrefixTokens) -> None:
    """Leave it beside the layers, where the hook finds it."""
    static_forward_context[_CONTEXT_NAME] = tokens


def get_prefix_tokens(static_forward_context: dict[str, Any]) -> PrefixTokens | None:
    """What `set_prefix_tokens` left; None where the codebook has no trained prefix."""
    return static_forward_context.get(_CONTEXT_NAME)
