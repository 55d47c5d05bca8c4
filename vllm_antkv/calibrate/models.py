"""A model to be calibrated."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.adapters import merged
from vllm_antkv.offline.pretrained import load_weights
from vllm_antkv.offline.traits import layer_traits


@dataclass(frozen=True)
class Streaming:
    """How a model is loaded that memory cannot hold: what does not fit is read whenever a layer is run.

    max_memory: bytes of weights that stay in each place, as accelerate takes them; the rest stays on disk.
    folder: for weights that transformers does not read as the checkpoint has them, such as those of experts.
    """

    max_memory: dict[int | str, int]
    folder: Path

    @property
    def options(self) -> dict[str, Any]:
        """For transformers' `from_pretrained`."""
        return {"device_map": "sequential", "max_memory": self.max_memory, "offload_folder": str(self.folder)}


def load_model(
    model: str, config: Any, device: torch.device, streaming: Streaming | None = None, lora: Path | None = None
) -> PreTrainedModel:
    """The model on `device`, an adapter merged into it, frozen, in evaluation mode.

    float32 on a CPU, where half precision is slow and gains nothing. On a GPU the dtype of the checkpoint, except that
    float16 becomes bfloat16: gradients of single tokens underflow float16.

    A layer that is streamed can be run backward only while layers are recomputed (`capture.checkpointed`).

    Raises:
        CalibrationError: its weights, or those of the adapter, cannot be loaded.
        UnsupportedModelError: its K and V cannot be taken, or its K not be turned back.
    """
    options = streaming.options if streaming else {}
    loaded = load_weights(model, CalibrationError, config=config, dtype=compute_dtype(config, device), **options)
    if lora is not None:
        loaded = merged(loaded, lora, CalibrationError)
    if streaming is None:
        loaded.to(device)  # type: ignore[arg-type]
    loaded.eval().requires_grad_(False)
    layer_traits(loaded)
    return loaded


def compute_dtype(config: Any, device: torch.device) -> torch.dtype:
    """The dtype in which the model is run."""
    if device.type == "cpu":
        return torch.float32
    stored = config.dtype or torch.bfloat16
    return torch.bfloat16 if stored == torch.float16 else stored
