"""Checkpoints with quantised weights, as llm-compressor writes them: compressed-tensors, weights rounded to nearest."""

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

#: Input channels that share a scale in 4 bits.
_GROUP = 32
_PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
#: The scheme of an FP8 KV cache that some checkpoints bring, with scales for each layer.
KV_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
#: By name: format, weights, activations.
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "W8A8": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        _PER_TOKEN,
    ),
    "W4A16": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP, "dynamic": False},
        None,
    ),
}


def quantise(original: Path, folder: Path, scheme: str, kv_scales: bool = False) -> Path:
    """Write the model with the weights of its layers quantised, and with scales for an FP8 KV cache where asked for."""
    folder.mkdir()
    for path in original.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        is_linear = name.endswith("_proj.weight")
        tensors |= _quantised(name, tensor, scheme) if is_linear else {name: tensor}
        if kv_scales and name.endswith("k_proj.weight"):
            attention = name.removesuffix(".k_proj.weight")
            tensors |= {f"{attention}.{kind}_scale": torch.tensor([0.5]) for kind in "kv"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    form, weights, activations = SCHEMES[scheme]
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
        },
        "kv_cache_scheme": KV_SCHEME if kv_scales else None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _quantised(name: str, weight: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """What stands in a checkpoint for a weight, (output_size, input_size)."""
    bits = SCHEMES[scheme][1]["num_bits"]
    largest = 2 ** (bits - 1) - 1
    grouped = weight.float().unflatten(1, (-1, _GROUP if scheme == "W4A16" else weight.shape[1]))
    scale = grouped.abs().amax(-1, keepdim=True) / largest
    rounded = (grouped / scale).round().to(torch.int8).flatten(1)
    scales = {f"{name}_scale": scale.squeeze(-1)}
    if scheme == "W8A8":
        return {name: rounded, **scales}
    shape = {f"{name}_shape": torch.tensor(weight.shape)}
    return {f"{name}_packed": pack_to_int32(rounded, bits), **shape, **scales}
