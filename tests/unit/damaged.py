"""Models that cannot be used, made from one that can: what users have after a broken download or a wrong edit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
#: Bytes that are neither text nor JSON nor safetensors.
JUNK = bytes(range(256))


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda model: (model / name).write_bytes(content)


def without(*names: str) -> Callable[[Path], object]:
    return lambda model: [(model / name).unlink() for name in names]


def cut(name: str) -> Callable[[Path], object]:
    return lambda model: replaced(name, (model / name).read_bytes()[:-100])(model)


def config_with(**changes: Any) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        config = json.loads((model / CONFIG).read_text())
        (model / CONFIG).write_text(json.dumps({**config, **changes}))

    return change


def weights_with(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def rewrite(model: Path) -> None:
        tensors = load_file(model / WEIGHTS)
        change(tensors)
        save_file(tensors, model / WEIGHTS, {"format": "pt"})

    return rewrite


_PROJECTION = "model.layers.1.self_attn.k_proj.weight"

#: What is done to the model, and words of the sentence that says so.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "config missing": (without(CONFIG), "No model can be read"),
    "config is junk": (replaced(CONFIG, JUNK), "not a valid JSON file"),
    "config cut": (cut(CONFIG), "not a valid JSON file"),
    "config empty": (replaced(CONFIG, b"{}"), "model_type"),
    "config is no object": (replaced(CONFIG, b"null"), "No model can be read"),
    "config of unknown type": (config_with(model_type="fancy"), "fancy"),
    "config with words for numbers": (config_with(num_hidden_layers="two"), "num_hidden_layers"),
    "config without layers": (config_with(num_hidden_layers=0), "num_layers 0"),
    "config without heads": (config_with(num_attention_heads=0), "No model can be read"),
    "config without KV heads": (config_with(num_key_value_heads=0), "num_kv_heads 0"),
    "config with an unknown activation": (config_with(hidden_act="xelu"), "xelu"),
    "config with an unknown RoPE": (config_with(rope_parameters={"rope_type": "spiral"}), "spiral"),
    "config with an unknown dtype": (config_with(dtype="float99"), "float99"),
    "tokenizer missing": (without(TOKENIZER, "tokenizer_config.json"), "No tokenizer can be read"),
    "tokenizer is junk": (replaced(TOKENIZER, JUNK), "No tokenizer can be read"),
    "tokenizer cut": (cut(TOKENIZER), "No tokenizer can be read"),
    "tokenizer empty": (replaced(TOKENIZER, b"{}"), "No tokenizer can be read"),
    "tokenizer settings are none": (replaced("tokenizer_config.json", b"[]"), "No tokenizer can be read"),
    "weights missing": (without(WEIGHTS), "cannot be loaded"),
    "weights are junk": (replaced(WEIGHTS, JUNK), "cannot be loaded"),
    "weights cut": (cut(WEIGHTS), "cannot be loaded"),
    "weights empty": (replaced(WEIGHTS, b""), "cannot be loaded"),
    "weights without a tensor": (weights_with(lambda tensors: tensors.pop(_PROJECTION)), _PROJECTION),
    "weights of another shape": (
        weights_with(lambda tensors: tensors.update({_PROJECTION: torch.zeros(3, 3)})),
        _PROJECTION,
    ),
}


def shrink_vocabulary(model: Path, vocab_size: int) -> None:
    """Leave the tokenizer with more tokens than the model has."""

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                tensors[name] = tensors[name][:vocab_size].clone()

    config_with(vocab_size=vocab_size)(model)
    weights_with(shrink)(model)
