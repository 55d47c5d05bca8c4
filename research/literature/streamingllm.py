"""`streamingllm-N`: a cache of N tokens, the first 4 and the most recent; all others are dropped (StreamingLLM, 3.2).

The contrast to quantising them (LogQuant, table 2). Tokens keep the positions they had: the paper renumbers them to go
beyond the model's context, which is not tried here. Takes no other recency.
"""

import torch

from research.literature.request import LiteratureRequest, SmallCache
from vllm_antkv.offline.method import Method

NAMES = ("streamingllm-64", "streamingllm-128", "streamingllm-256")

_SINKS = 4


class SinksAndWindow(SmallCache):
    """The first tokens and the last."""

    def visible(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        """See `Eviction.visible`."""
        positions = torch.arange(key.shape[1], device=key.device)
        age = positions[:, None] - positions
        return ((age >= 0) & ((age < self.size - _SINKS) | (positions < _SINKS)))[None, None]


def build(name: str, request: LiteratureRequest) -> Method:
    """Of the size that the name says."""
    return request.evicting(name, SinksAndWindow, sinks=_SINKS)
