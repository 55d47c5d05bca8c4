"""The tensors of a codebook file: names, dtypes and shapes, which follow from the header, and their checks."""

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_antkv.codebook.header import CodebookHeader
from vllm_antkv.errors import CodebookError

#: safetensors' names of dtypes.
_DTYPE_NAMES = {torch.float16: "F16", torch.float32: "F32"}
#: As in `Codebook`. A file without them serves uncorrected logits, and K unscaled.
OPTIONAL = ("k_errors", "k_scale")
#: Of `k_scale`, as float32 has it: one more than the power.
_MOST_EXPONENT = 8


@dataclass(frozen=True)
class Form:
    """dtype, by safetensors' name, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {reprlib.repr(self.shape)}"


def form_of(tensor: torch.Tensor) -> Form:
    """Of a tensor in hand."""
    return Form(_DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))


def check_forms(header: CodebookHeader, forms: Mapping[str, Form], path: Path) -> None:
    """CodebookError unless there are exactly the tensors that the header tells of, or those and `OPTIONAL` ones."""
    model, wanted = header.model, _wanted_forms(header)
    if set(forms) - set(OPTIONAL) != set(wanted):
        raise CodebookError(
            f"{path} is damaged: it holds tensors {reprlib.repr(sorted(forms))}, not {' and '.join(wanted)}."
        )
    optional = Form("F32", (model.num_layers, model.num_kv_heads, model.head_size))
    for name, form in (wanted | dict.fromkeys(OPTIONAL, optional)).items():
        if forms.get(name, form) != form:
            raise CodebookError(f"{path} is damaged: {name} is {forms[name]}, but must be {form}.")


def _wanted_forms(header: CodebookHeader) -> dict[str, Form]:
    model, wanted = header.model, dict[str, Form]()
    for suffix, indices in stacks(header).items():
        preset = header.layer_presets[indices[0]]
        num_sub_vectors = preset.num_sub_vectors(model.head_size)
        shape = (len(indices), model.num_kv_heads, num_sub_vectors, preset.num_centroids, preset.sub_vector_size)
        wanted |= dict.fromkeys(("k" + suffix, "v" + suffix), Form("F16", shape))
    return wanted


def stacks(header: CodebookHeader) -> dict[str, list[int]]:
    """Layers stacked in one tensor, by the suffix of its name; those of the header's preset have none (`k` and `v`)."""
    layers: dict[str, list[int]] = {}
    for index, preset in enumerate(header.layer_presets):
        suffix = "" if preset.name == header.preset else f".{preset.name}"
        layers.setdefault(suffix, []).append(index)
    return layers


def by_layer(header: CodebookHeader, kind: str, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Every layer's centroids, from the stacked tensors."""
    layers = {
        index: layer
        for suffix, indices in stacks(header).items()
        for index, layer in zip(indices, tensors[kind + suffix], strict=True)
    }
    return tuple(layers[index] for index in range(header.model.num_layers))


def check_values(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """CodebookError when a value cannot be served."""
    for name, tensor in tensors.items():
        if name in OPTIONAL and (tensor < 0).any():
            raise CodebookError(f"{path} is damaged: {name} holds values below 0.")
        # Seven times as fast as `isfinite` of every float16 value.
        if not torch.stack(tensor.aminmax()).isfinite().all():
            raise CodebookError(f"{path} is damaged: {name} holds values that are not finite.")
        if name == "k_scale" and not _is_power_of_two(tensor).all():
            raise CodebookError(f"{path} is damaged: {name} holds values that are no powers of two.")


def _is_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Logits would change by any other, and K of float16 would overflow by large ones."""
    mantissa, exponent = scales.frexp()
    return (mantissa == 0.5) & (exponent.abs() <= _MOST_EXPONENT)


def checksum_of(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the header as JSON, without its checksum, and of the tensors."""
    content = {key: value for key, value in header.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()
