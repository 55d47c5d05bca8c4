"""Memory that the layers of a worker share for the length of a step."""

from typing import Any

import torch
from vllm.v1.worker.workspace import current_workspace_manager

#: Shapes that a layer asks for in every step. Those of some kernels vary.
_MOST_KEPT = 4


class Workspace:
    """See `ops.layer.Scratch`: vLLM's own workspace, of one layer.

    It does not grow any more once the worker has warmed up. What was given since is given again: views take longer than
    a launch. A layer always runs in the same lane.
    """

    def __init__(self) -> None:
        self._given: dict[Any, list[torch.Tensor]] = {}

    def __call__(self, *shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        """Tensors that hold anything."""
        given = self._given.get(shapes_and_dtypes)
        if given is None:
            manager = current_workspace_manager()
            given = manager.get_simultaneous(*shapes_and_dtypes)
            if manager.is_locked() and len(self._given) < _MOST_KEPT:
                self._given[shapes_and_dtypes] = given
        return given
