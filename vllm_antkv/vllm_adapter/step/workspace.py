"""Memory that the layers of a worker share for the length of a step."""

import torch
from vllm.v1.worker.workspace import current_workspace_manager


def workspace(*shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """See `ops.layer.Scratch`: vLLM's own workspace, which does not grow any more once CUDA graphs are captured."""
    return current_workspace_manager().get_simultaneous(*shapes_and_dtypes)
