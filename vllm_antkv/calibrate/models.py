"""A model to be calibrated, and where it keeps the K and V that a cache would hold.

K is taken before RoPE (AnTKV, section 4.1) and after a key norm where the family has one: rows are coded at exactly
that point when serving.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import CalibrationError, UnsupportedModelError
from vllm_antkv.families import FAMILIES, Family
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.pretrained import load_weights, read_config


@dataclass(frozen=True)
class CapturePoint:
    """A module whose output holds the K or the V rows of one layer.

    layer: index of the decoder layer.
    kind: 0 for K, 1 for V.
    module: its output is (1, num_tokens, channels), or (1, num_tokens, num_kv_heads, head_size) behind a key norm.
    channels: the part of the last dimension that holds the rows.
    """

    layer: int
    kind: int
    module: nn.Module
    channels: slice


def load_config(model: str) -> Any:
    """The Hugging Face config of a supported model.

    Raises:
        CalibrationError: there is no such model, or its config cannot be read.
        UnsupportedModelError: its architecture is not in `families.FAMILIES`, or its weights are quantised.
    """
    config = read_config(model, CalibrationError)
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{model} is of type '{config.model_type}', which is not supported: supported are {', '.join(FAMILIES)}."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{model} has quantised weights, through which no gradient flows: calibrate the unquantised model, "
            "its codebooks fit both."
        )
    return config


def load_model(model: str, config: Any, device: torch.device) -> nn.Module:
    """The model on `device`, frozen, in evaluation mode.

    float32 on a CPU, where half precision is slow and gains nothing. On a GPU the dtype of the checkpoint, except that
    float16 becomes bfloat16: gradients of single tokens underflow float16.
    """
    family = FAMILIES[config.model_type]
    dtype = compute_dtype(config, device)
    loaded: nn.Module = load_weights(
        model, CalibrationError, config=config, dtype=dtype, attn_implementation=family.attention
    )
    return loaded.to(device).eval().requires_grad_(False)


def compute_dtype(config: Any, device: torch.device) -> torch.dtype:
    """The dtype in which the model is run."""
    if device.type == "cpu":
        return torch.float32
    stored = config.dtype or torch.bfloat16
    return torch.bfloat16 if stored == torch.float16 else stored


def capture_points(model: nn.Module, config: Any) -> list[CapturePoint]:
    """K and V of every layer of a loaded model, in model order."""
    family = FAMILIES[config.model_type]
    identity = ModelIdentity.from_hf_config(config)
    key, value = _channels(family, identity)
    points = []
    for layer, block in enumerate(decoder_layers(model)):
        points.append(CapturePoint(layer, 0, getattr(block.self_attn, family.key), key))
        points.append(CapturePoint(layer, 1, getattr(block.self_attn, family.value), value))
    return points


def _channels(family: Family, identity: ModelIdentity) -> tuple[slice, slice]:
    if family.key != family.value:
        return slice(None), slice(None)
    queries = identity.num_attention_heads * identity.head_size
    rows = identity.num_kv_heads * identity.head_size
    return slice(queries, queries + rows), slice(queries + rows, queries + 2 * rows)
