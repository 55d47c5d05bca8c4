"""The codebook file: centroids, sinks and trained prefix of one (model, preset), and where such files are looked up.

One safetensors file, never pickle. Its metadata holds a JSON header that is checked against the tensors and against the
model before anything is served; see `docs/calibration.md` for the format.
"""

import hashlib
import importlib.resources
import json
import os
import reprlib
import stat
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm_antkv.codebook_header import (
    FORMAT_VERSION,
    CodebookHeader,
    ModelIdentity,
    SinkRule,
    check_header,
    differences,
    parse_header,
)
from vllm_antkv.codebook_prefix import TrainedPrefix
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import CodebookError
from vllm_antkv.presets import Preset, get_preset

__all__ = [
    "FORMAT_VERSION",
    "Codebook",
    "CodebookHeader",
    "ModelIdentity",
    "SinkRule",
    "codebook_path",
    "default_folders",
    "find_codebook",
    "shipped_folder",
    "user_folder",
]

_HEADER_KEY = "antkv"
#: safetensors' names of dtypes.
_DTYPE_NAMES = {torch.float16: "F16", torch.float32: "F32"}
#: A header is a few hundred bytes; more is not a header.
_MAX_HEADER_BYTES = 1 << 20
#: The largest models need 2 MiB for each of a few thousand KV heads; a file that claims more is read no further.
_MAX_FILE_BYTES = 32 << 30
_MAX_REASON = 200


@dataclass(frozen=True)
class Codebook:
    """Centroids of every (layer, KV head, sub-vector position), for K before RoPE and for V.

    k, v: for every layer (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) float16, as its preset has it.
    prefix_k, prefix_v: rows of the trained prefix, as in `TrainedPrefix`, where the header has one.
    """

    header: CodebookHeader
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    prefix_k: torch.Tensor | None = None
    prefix_v: torch.Tensor | None = None

    @property
    def preset(self) -> Preset:
        """The preset that is served; a layer's own may differ (`CodebookHeader.layer_presets`)."""
        return get_preset(self.header.preset)

    @property
    def prefix(self) -> TrainedPrefix | None:
        """The trained prefix, if there is one."""
        if self.header.prefix is None:
            return None
        assert self.prefix_k is not None
        assert self.prefix_v is not None
        return TrainedPrefix(self.header.prefix, self.prefix_k, self.prefix_v)

    def with_prefix(self, prefix: TrainedPrefix | None) -> Self:
        """The same codebook with this trained prefix, or with none."""
        header = self.header.model_copy(update={"prefix": None if prefix is None else prefix.token_ids})
        rows = {"prefix_k": None, "prefix_v": None} if prefix is None else {"prefix_k": prefix.k, "prefix_v": prefix.v}
        return replace(self, header=header, **rows)

    def settings(self, config: AntKVConfig) -> AntKVConfig:
        """`config` with at least the trained prefix exact: its rows were trained to be read as they are."""
        return config.model_copy(update={"prefix": max(config.prefix, len(self.header.prefix or ()))})

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
        _check_forms(self.header, {name: _form_of(tensor) for name, tensor in tensors.items()}, path)
        _check_values(tensors, path)
        checksum = _checksum(json.loads(self.header.model_dump_json()), tensors)
        header = self.header.model_copy(update={"checksum": checksum})
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(save(tensors, {_HEADER_KEY: header.model_dump_json()}))
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise

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
        _check_values(tensors, path)
        if header.checksum != _checksum(raw, tensors):
            raise CodebookError(f"{path} is damaged: its checksum does not match; run `antkv calibrate` again.")
        k, v = (_by_layer(header, kind, tensors) for kind in ("k", "v"))
        return cls(header, k, v, tensors.get("prefix_k"), tensors.get("prefix_v"))

    def _tensors(self) -> dict[str, torch.Tensor]:
        """As they are in the file: the layers of a preset are stacked."""
        tensors = {
            kind + suffix: torch.stack([layers[index] for index in indices])
            for suffix, indices in _stacks(self.header).items()
            for kind, layers in (("k", self.k), ("v", self.v))
        }
        prefix = {"prefix_k": self.prefix_k, "prefix_v": self.prefix_v}
        return tensors | {name: rows.contiguous() for name, rows in prefix.items() if rows is not None}


def codebook_path(folder: Path, preset: str) -> Path:
    """The file of one preset in a folder of codebooks."""
    return folder / f"{preset}.safetensors"


def find_codebook(model_name: str, identity: ModelIdentity, preset: str, folder: str | None = None) -> Path:
    """Where the codebook for this model is.

    `folder` when given; otherwise beside the model (`MODEL/antkv/`), among those shipped with vllm-antkv, then in the
    user's cache. Raises CodebookError with the command that makes one when there is none.
    """
    folders = [Path(folder)] if folder is not None else default_folders(model_name, identity)
    for candidate in folders:
        path = codebook_path(candidate, preset)
        # Whatever has the name is the one that is meant: reading it says what is wrong with it.
        if os.path.lexists(path):
            return path
    out = folder or str(user_folder(identity))
    raise CodebookError(
        f"No {preset} codebook for {model_name} in {', '.join(map(str, folders))}: make one with "
        f"`antkv calibrate {model_name} --preset {preset} --text FILE --out {out}`."
    )


def default_folders(model_name: str, identity: ModelIdentity) -> list[Path]:
    """Folders searched when no `codebooks` setting is given, in order."""
    beside = [Path(model_name) / "antkv"] if Path(model_name).is_dir() else []
    return [*beside, shipped_folder(identity), user_folder(identity)]


def shipped_folder(identity: ModelIdentity) -> Path:
    """Where this package ships codebooks for a model."""
    return Path(str(importlib.resources.files("vllm_antkv.centroids"))) / identity.key


def user_folder(identity: ModelIdentity) -> Path:
    """Where this user's codebooks for a model are kept."""
    return user_cache_path("vllm-antkv") / identity.key


@dataclass(frozen=True)
class _Form:
    """dtype, by safetensors' name, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {reprlib.repr(self.shape)}"


def _form_of(tensor: torch.Tensor) -> _Form:
    return _Form(_DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))


def _read(
    path: Path, preset: str | None, model: ModelIdentity | None
) -> tuple[dict[str, Any], CodebookHeader, dict[str, torch.Tensor]]:
    """The header, as it is written and as it is understood, and the tensors.

    Everything that the header tells is checked before a tensor is read.
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
            forms = {name: _Form(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            _check_forms(header, forms, path)
            return raw, header, {name: file.get_tensor(name) for name in forms}
    except OSError as error:
        raise CodebookError(f"{path} cannot be read ({error.strerror or error}).") from None
    except (SafetensorError, ValueError, RuntimeError) as error:
        # Of safetensors, of the JSON parser, and of PyTorch when the file cannot be mapped.
        # They quote the file, which may hold anything.
        reason = "".join(filter(str.isprintable, str(error)))[:_MAX_REASON].rstrip(".")
        raise CodebookError(f"{path} is not a readable codebook ({reason}).") from None


def _check_file(path: Path) -> None:
    """CodebookError or OSError unless this is a file of a size, and with a head, that a codebook may have."""
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


def _check_forms(header: CodebookHeader, forms: Mapping[str, _Form], path: Path) -> None:
    """CodebookError unless there are exactly the tensors that the header tells of."""
    wanted = _wanted_forms(header)
    if set(forms) != set(wanted):
        raise CodebookError(
            f"{path} is damaged: it holds tensors {reprlib.repr(sorted(forms))}, not {' and '.join(wanted)}."
        )
    for name, form in wanted.items():
        if forms[name] != form:
            raise CodebookError(f"{path} is damaged: {name} is {forms[name]}, but must be {form}.")


def _wanted_forms(header: CodebookHeader) -> dict[str, _Form]:
    model, wanted = header.model, dict[str, _Form]()
    for suffix, indices in _stacks(header).items():
        preset = header.layer_presets[indices[0]]
        num_sub_vectors = preset.num_sub_vectors(model.head_size)
        shape = (len(indices), model.num_kv_heads, num_sub_vectors, preset.num_centroids, preset.sub_vector_size)
        wanted |= dict.fromkeys(("k" + suffix, "v" + suffix), _Form("F16", shape))
    if header.prefix is not None:
        # Not F16: rows are those of models in bfloat16, too, and those of sinks may be large.
        rows = _Form("F32", (model.num_layers, len(header.prefix), model.num_kv_heads, model.head_size))
        wanted |= dict.fromkeys(("prefix_k", "prefix_v"), rows)
    return wanted


def _stacks(header: CodebookHeader) -> dict[str, list[int]]:
    """Which layers stand in one tensor, by what its name ends with: those of the header's own preset in `k` and `v`."""
    stacks: dict[str, list[int]] = {}
    for index, preset in enumerate(header.layer_presets):
        suffix = "" if preset.name == header.preset else f".{preset.name}"
        stacks.setdefault(suffix, []).append(index)
    return stacks


def _by_layer(header: CodebookHeader, kind: str, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Every layer's centroids, from the tensors in which those of a preset are stacked."""
    layers = {
        index: layer
        for suffix, indices in _stacks(header).items()
        for index, layer in zip(indices, tensors[kind + suffix], strict=True)
    }
    return tuple(layers[index] for index in range(header.model.num_layers))


def _check_values(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """CodebookError when a value is not finite. Layer by layer: a mask over all would be half a codebook more."""
    for name, tensor in tensors.items():
        if not all(layer.isfinite().all() for layer in tensor):
            raise CodebookError(f"{path} is damaged: {name} holds values that are not finite.")


def _checksum(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """Over everything that is served: the header as JSON, but for its checksum, and the tensors."""
    content = {key: value for key, value in header.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()
