"""Ways to spoil a codebook file; everything that a way does not touch stays as in a good file, the checksum too."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.codebooks import random_codebook
from tests.places import PRESET
from vllm_antkv.codebook import Codebook, ModelIdentity

#: Puts something into the place of a codebook.
Spoil = Callable[[Path], object]

MODEL = ModelIdentity(
    architecture="LlamaForCausalLM",
    num_layers=2,
    num_attention_heads=4,
    num_kv_heads=2,
    head_size=16,
    hidden_size=64,
    vocab_size=100,
)


def good_codebook() -> Codebook:
    return random_codebook(MODEL, PRESET)


def nothing(path: Path) -> None:
    """No file."""


def a_folder(path: Path) -> None:
    path.mkdir()


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def replaced_bytes(content: bytes) -> Spoil:
    return lambda path: path.write_bytes(content)


def head(length: int) -> bytes:
    """The first 8 bytes of a safetensors file: the length of its header."""
    return struct.pack("<Q", length)


def raw_header(header: bytes, tensors: bytes = b"") -> Spoil:
    return replaced_bytes(head(len(header)) + header + tensors)


def claiming(shape: list[Any], offsets: tuple[int, int] = (0, 4)) -> Spoil:
    """A file of 4 bytes whose header claims a tensor k of a shape."""
    claim = {"dtype": "F16", "shape": shape, "data_offsets": offsets}
    return raw_header(json.dumps({"k": claim}).encode(), bytes(4))


def sparse(size: int) -> Spoil:
    """A file that takes no disk; its header belongs to a model whose codebook would be about as large."""

    def make(path: Path) -> None:
        good = good_codebook()
        per_layer = good.num_bytes // MODEL.num_layers
        model = {**MODEL.model_dump(), "num_layers": size // per_layer}
        shape = [model["num_layers"], *good.k[0].shape]
        half = per_layer // 2 * model["num_layers"]
        header = {
            "__metadata__": {"antkv": json.dumps({**_header(good), "model": model})},
            "k": {"dtype": "F16", "shape": shape, "data_offsets": [0, half]},
            "v": {"dtype": "F16", "shape": shape, "data_offsets": [half, 2 * half]},
        }
        text = json.dumps(header).encode()
        path.write_bytes(head(len(text)) + text)
        os.truncate(path, 8 + len(text) + 2 * half)

    return make


def header_text(text: str | None) -> Spoil:
    """A file with this text in the place of our header; None: with none at all."""
    return lambda path: _rewrite(path, {"format": "pt"} if text is None else {"antkv": text})


def header_field(**changes: Any) -> Spoil:
    return lambda path: _rewrite(path, {"antkv": json.dumps({**_header(good_codebook()), **changes})})


def model_field(**changes: Any) -> Spoil:
    return header_field(model={**MODEL.model_dump(), **changes})


def sinks(layer: int, channels: list[int], threshold: object) -> Spoil:
    """Another sink rule in our header; `threshold` is put there as it prints."""
    header = _header(good_codebook())
    rule = f'{{"layer": {layer}, "channels": {channels}, "threshold": {threshold}}}'
    return header_text(json.dumps({**header, "sinks": "RULE"}).replace('"RULE"', rule))


def duplicated(key: str) -> Spoil:
    """Our header with one key twice, both times with its right value."""
    header = _header(good_codebook())
    text = json.dumps(header)
    return header_text(f"{{{json.dumps(key)}: {json.dumps(header[key])}, {text[1:]}")


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    """Another tensor `name`, made from it or, where there is none of that name, from k."""

    def spoil(path: Path) -> None:
        tensors = _tensors(path)
        tensors[name] = change(tensors.get(name, tensors["k"])).contiguous()
        _save(path, tensors)

    return spoil


def without_tensor(missing: str) -> Spoil:
    return lambda path: _save(path, {name: tensor for name, tensor in _tensors(path).items() if name != missing})


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    good_codebook().save(path)
    return load_file(path)


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata)


def _rewrite(path: Path, metadata: dict[str, str]) -> None:
    save_file(_tensors(path), path, metadata)


def _header(codebook: Codebook) -> dict[str, Any]:
    return json.loads(codebook.header.model_dump_json())
