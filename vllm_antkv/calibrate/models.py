"""A model to be calibrated."""

from typing import Any

import torch
from transformers import PreTrainedModel

from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.pretrained import load_weights
from vllm_antkv.offline.traits import layer_traits


def load_model(model: str, config: Any, device: torch.device) -> PreTrainedModel:
    """The model on `device`, frozen, in evaluation mode.

    float32 on a CPU, where half precision is slow and gains nothing. On a GPU the dtype of the checkpoint, except that
    float16 becomes bfloat16: gradients of single tokens underflow float16.

    Raises:
        CalibrationError: its weights cannot be loaded.
        UnsupportedModelError: its K and V cannot be taken, or its K not be turned back.
    """
    loaded = load_weights(model, CalibrationError, config=config, dtype=compute_dtype(config, device))
    loaded = loaded.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    layer_traits(loaded)
    return loaded


def compute_dtype(config: Any, device: torch.device) -> torch.dtype:
    """The dtype in which the model is run."""
    if device.type == "cpu":
        return torch.float32
    stored = config.dtype or torch.bfloat16
    return torch.bfloat16 if stored == torch.float16 else stored
