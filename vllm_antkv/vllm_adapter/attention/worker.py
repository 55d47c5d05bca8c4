"""What all attention layers of a worker share."""

from dataclasses import dataclass

import torch
from vllm.v1.worker.workspace import current_workspace_manager

from vllm_antkv.ops.counters import Counters
from vllm_antkv.vllm_adapter.attention.trained_prefix import PrefixTokens


@dataclass(frozen=True)
class Worker:
    """Of one worker process.

    counters: what the layers count.
    prefix_tokens: which tokens of a step get a row of the trained prefix, where the codebook has one.
    """

    counters: Counters
    prefix_tokens: PrefixTokens | None


def workspace(*shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """See `ops.layer.Scratch`: vLLM's own workspace, which does not grow any more once CUDA graphs are captured."""
    return current_workspace_manager().get_simultaneous(*shapes_and_dtypes)
