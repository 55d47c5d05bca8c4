"""The codebook file: centroids and sinks of one (model, preset).

One safetensors file, never pickle. Its metadata holds a JSON header that is checked against the tensors and against the
model before anything is served; see `docs/codebook-file.md` for the format.
"""

import json
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm_antkv.codebook.header import CodebookHeader, check_header, parse_header
from vllm_antkv.codebook.identity import ModelIdentity, differences
from vllm_antkv.codebook.tensors import (
    OPTIONAL,
    Form,
    by_layer,
    check_forms,
    check_values,
    checksum_of,
    form_of,
    stacks,
)
from vllm_antkv.errors import CodebookError
from vllm_antkv.presets import LAYER_PRESETS, Preset
from vllm_antkv.whole_file import write_whole

_HEADER_KEY = "antkv"
#: A header is a few hundred bytes; more is not a header.
_MAX_HEADER_BYTES = 1 << 20
#: The largest models need 2 MiB for each of a few thousand KV heads; larger files are refused unread.
_MAX_FILE_BYTES = 32 << 30
_MAX_REASON = 200


@dataclass(frozen=True)
class Codebook:
    """Centroids of every (layer, KV head, sub-vector position), for K before RoPE and for V.

    k, v: for every layer (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) float16, as its preset has it.
    k_errors: (num_layers, num_kv_heads, head_size) float32, mean squared error of each channel of coded K before RoPE,
        in the model's order, both channels of a rotary pair alike; corrects logits (`ops.reference.jensen_weights`).
        Times the size of the correction that suits a layer (`offline.divergences`), where layers were measured.
    k_scale: (num_layers, num_kv_heads, head_size) float32 powers of two, by which K is scaled (`codebook.key_scales`);
        None: it is not.
    """

    header: CodebookHeader
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    k_errors: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None

    @property
    def preset(self) -> Preset:
        """What is served, or learned as a part of mixes; a layer's own may differ (`CodebookHeader.layer_presets`)."""
        return LAYER_PRESETS[self.header.preset]

    @property
    def num_bytes(self) -> int:
        """Bytes of all centroids."""
        return sum(layer.nbytes for layer in (*self.k, *self.v))

    @property
    def identity(self) -> str:
        """Short hash of the whole content, shown in logs, status and metrics."""
        return self.header.checksum[:12]

    def save(self, path: Path) -> None:
        """Write atomically: readers see the old file or the whole new one.

        The header's checksum is computed here.
        """
        check_header(self.header, path)
        tensors = self._tensors()
        check_forms(self.header, {name: form_of(tensor) for name, tensor in tensors.items()}, path)
        check_values(tensors, path)
        checksum = checksum_of(json.loads(self.header.model_dump_json()), tensors)
        header = self.header.model_copy(update={"checksum": checksum})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save(tensors, {_HEADER_KEY: header.model_dump_json()}))

    @classmethod
    def load(cls, path: Path, preset: str | None = None, model: ModelIdentity | None = None) -> Self:
        """Read and check a file.

        Args:
            path: the file.
            preset: when given, the preset it must hold.
            model: when given, the model it must have been learned from.

        Raises:
            CodebookError: missing or damaged file, wrong format version, wrong preset, wrong model.
        """
        raw, header, tensors = _read(path, preset, model)
        check_values(tensors, path)
        if header.checksum != checksum_of(raw, tensors):
            raise CodebookError(f"{path} is damaged: its checksum does not match; run `antkv calibrate` again.")
        k, v = (by_layer(header, kind, tensors) for kind in ("k", "v"))
        return cls(header, k, v, **{name: tensors.get(name) for name in OPTIONAL})

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Tensors as stored: the layers of a preset are stacked."""
        tensors = {
            kind + suffix: torch.stack([layers[index] for index in indices])
            for suffix, indices in stacks(self.header).items()
            for kind, layers in (("k", self.k), ("v", self.v))
        }
        optional = {name: getattr(self, name) for name in OPTIONAL}
        return tensors | {name: rows.contiguous() for name, rows in optional.items() if rows is not None}


def _read(
    path: Path, preset: str | None, model: ModelIdentity | None
) -> tuple[dict[str, Any], CodebookHeader, dict[str, torch.Tensor]]:
    """The raw JSON header, the parsed one, and the tensors.

    The whole header is checked before a tensor is read.
    """
    try:
        _check_file(path)
        with safe_open(path, framework="pt") as file:
            raw, header = parse_header((file.metadata() or {}).get(_HEADER_KEY), path)
            check_header(header, path)
            if preset is not None and header.preset != preset:
                raise CodebookError(f"{path} holds centroids for {header.preset}, not for {preset}.")
            if model is not None and header.model != model:
                raise CodebookError(f"{path} was learned from another model: {differences(header.model, model)}.")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            forms = {name: Form(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            check_forms(header, forms, path)
            return raw, header, {name: file.get_tensor(name) for name in forms}
    except OSError as error:
        raise CodebookError(f"{path} cannot be read ({error.strerror or error}).") from None
    except (SafetensorError, ValueError, RuntimeError) as error:
        # From safetensors, the JSON parser, or PyTorch when the file cannot be mapped.
        # These errors quote the file, which may contain control characters.
        reason = "".join(filter(str.isprintable, str(error)))[:_MAX_REASON].rstrip(".")
        raise CodebookError(f"{path} is not a readable codebook ({reason}).") from None


def _check_file(path: Path) -> None:
    """CodebookError or OSError unless the file's size and header length are plausible for a codebook."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CodebookError(f"{path} is not a file.")
    if status.st_size > _MAX_FILE_BYTES:
        raise CodebookError(f"{path} has {status.st_size >> 30} GiB, more than the codebooks of any model.")
    with path.open("rb") as file:
        head = file.read(8)
    # safetensors would parse up to 100 MB here.
    if len(head) == 8 and struct.unpack("<Q", head)[0] > _MAX_HEADER_BYTES:
        raise CodebookError(f"{path} is not a readable codebook (its header is too large).")
