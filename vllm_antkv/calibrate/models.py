"""A model to be calibrated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.adapters import merged
from vllm_antkv.offline.pretrained import load_weights
from vllm_antkv.offline.traits import layer_traits


def load_model(
    model: str, config: Any, device: torch.device, streaming: Mapping[str, Any] | None = None, lora: Path | None = None
) -> PreTrainedModel:
    """The model on `device`, an adapter merged into it, frozen, in evaluation mode.

    float32 on a CPU, where half precision is slow and gains nothing. On a GPU the dtype of the checkpoint, except that
    float16 becomes bfloat16: gradients of single tokens underflow float16.

    Args:
        streaming: for transformers' `from_pretrained`, where memory cannot hold the model: what does not fit is read
            whenever a layer is run. It can be run backward only while layers are recomputed (`capture.checkpointed`).

    Raises:
        CalibrationError: its weights, or those of the adapter, cannot be loaded.
        UnsupportedModelError: its K and V cannot be taken, or its K not be turned back.
    """
    dtype = compute_dtype(config, device)
    loaded = load_weights(model, CalibrationError, config=config, dtype=dtype, **(streaming or {}))
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
