"""What all attention layers of a worker share, kept where vLLM's metadata builders find it."""

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.workspace import current_workspace_manager

from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.dispatch import Kernels

_CONTEXT_NAME = "antkv.worker"


@dataclass(frozen=True)
class Worker:
    """Of one worker process.

    kernels: what runs the operations.
    counters: what they count.
    counting_layer: name of the layer whose steps and rows are counted for all.
    """

    kernels: Kernels
    counters: Counters
    counting_layer: str


def set_worker(vllm_config: VllmConfig, worker: Worker) -> None:
    """Leave it beside the layers, which vLLM finds there by their names."""
    vllm_config.compilation_config.static_forward_context[_CONTEXT_NAME] = worker


def get_worker(vllm_config: VllmConfig) -> Worker:
    """What `set_worker` left."""
    return vllm_config.compilation_config.static_forward_context[_CONTEXT_NAME]


def workspace(*shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """See `ops.layer.Scratch`: vLLM's own workspace, which does not grow any more once CUDA graphs are captured."""
    return current_workspace_manager().get_simultaneous(*shapes_and_dtypes)
