"""`streamingllm-N`: a cache of N tokens, the first 4 and the most recent; all others are dropped (StreamingLLM, 3.2).

The contrast to quantising them (LogQuant, table 2). Tokens keep the positions they had: the paper renumbers them to go
beyond the model's context, which is not tried here. Takes no other recency.
"""

from dataclasses import dataclass

import torch

from vllm_antkv.laboratory.base import MethodRequest
from vllm_antkv.offline.method import Method

NAMES = ("streamingllm-64", "streamingllm-128", "streamingllm-256")

_SINKS = 4


@dataclass(frozen=True)
class SinksAndWindow:
    """The first tokens and the last."""

    size: int

    def visible(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        """See `Eviction.visible`."""
        positions = torch.arange(key.shape[1], device=key.device)
        age = positions[:, None] - positions
        return ((age >= 0) & ((age < self.size - _SINKS) | (positions < _SINKS)))[None, None]

    def kept(self, num_tokens: int) -> int:
        """See `Eviction.kept`."""
        return min(self.size, num_tokens)


def build(name: str, request: MethodRequest) -> Method:
    """No codes: what is kept is kept in 16 bits."""
    size = int(name.removeprefix("streamingllm-"))
    return Method(
        name=name,
        nominal_bits=16.0,
        config=request.config,
        eviction=SinksAndWindow(size),
        provenance={"cache": size, "sinks": _SINKS},
    )
