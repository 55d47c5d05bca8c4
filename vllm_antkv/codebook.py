"""The codebook file: centroids and sinks of one (model, preset), and where such files are looked up.

One safetensors file, never pickle. Its metadata holds a JSON header that is checked against the tensors and against the
model before anything is served; see `docs/calibration.md` for the format.
"""

import hashlib
import importlib.resources
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from platformdirs import user_cache_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm_antkv import __version__
from vllm_antkv.errors import CodebookError, SettingsError, UnsupportedModelError
from vllm_antkv.presets import Preset, get_preset

FORMAT_VERSION = 1
_HEADER_KEY = "antkv"
#: A header is a few hundred bytes; more is not a header.
_MAX_HEADER_CHARS = 1 << 20


class ModelIdentity(BaseModel):
    """What must agree between the model a codebook was learned from and the model it serves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    num_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)

    @classmethod
    def from_hf_config(cls, hf_config: Any) -> Self:
        """Read the identity from a Hugging Face `PretrainedConfig` (of a text model, or holding one).

        Raises UnsupportedModelError when the config lacks one of the sizes, or has one that is no size.
        """
        text = hf_config.get_text_config()
        heads = getattr(text, "num_attention_heads", None)
        kv_heads = getattr(text, "num_key_value_heads", None)
        hidden_size = getattr(text, "hidden_size", None)
        try:
            return cls(
                architecture=(getattr(hf_config, "architectures", None) or [text.model_type])[0],
                num_layers=getattr(text, "num_hidden_layers", None),
                num_attention_heads=heads,
                num_kv_heads=heads if kv_heads is None else kv_heads,
                head_size=getattr(text, "head_dim", None) or (hidden_size // heads if hidden_size and heads else None),
                hidden_size=hidden_size,
                vocab_size=getattr(text, "vocab_size", None),
            )
        except ValidationError as error:
            field = error.errors()[0]
            raise UnsupportedModelError(
                f"A model of type {text.model_type} with {field['loc'][0]} {field['input']} cannot be used with "
                "vllm-antkv, which needs a number above 0 there."
            ) from None

    @property
    def key(self) -> str:
        """Short stable hash, used as a folder name."""
        text = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class SinkRule(BaseModel):
    """KVSink: after decoder layer `layer`, a token is a sink when |hidden[c]| > threshold for a c in `channels`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: int = Field(ge=0)
    channels: tuple[int, ...] = Field(min_length=1)
    threshold: float = Field(gt=0)


class CodebookHeader(BaseModel):
    """The JSON header of a codebook file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    preset: str
    model: ModelIdentity
    sinks: SinkRule | None
    calibration: dict[str, Any]
    antkv_version: str = __version__
    checksum: str = ""


@dataclass(frozen=True)
class Codebook:
    """Centroids of every (layer, KV head, sub-vector position), for K before RoPE and for V.

    k, v: (num_layers, num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) float16.
    """

    header: CodebookHeader
    k: torch.Tensor
    v: torch.Tensor

    @property
    def preset(self) -> Preset:
        """The preset these centroids belong to."""
        return get_preset(self.header.preset)

    @property
    def num_bytes(self) -> int:
        """Bytes of all centroids."""
        return self.k.nbytes + self.v.nbytes

    @property
    def identity(self) -> str:
        """Short hash of the whole content, shown in logs, status and metrics."""
        return self.header.checksum[:12]

    def save(self, path: Path) -> None:
        """Write atomically: readers see the old file or the whole new one.

        The header's checksum is computed here.
        """
        _check_tensors(self.header, self.k, self.v, path)
        tensors = {"k": self.k.contiguous(), "v": self.v.contiguous()}
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
        header, tensors, checksum = _read(path)
        if preset is not None and header.preset != preset:
            raise CodebookError(f"{path} holds centroids for {header.preset}, not for {preset}.")
        if model is not None and header.model != model:
            raise CodebookError(f"{path} was learned from another model: {_differences(header.model, model)}.")
        k, v = tensors["k"], tensors["v"]
        _check_tensors(header, k, v, path)
        if header.checksum != checksum:
            raise CodebookError(f"{path} is damaged: its checksum does not match; run `antkv calibrate` again.")
        return cls(header, k, v)


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
        if path.is_file():
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


def _read(path: Path) -> tuple[CodebookHeader, dict[str, torch.Tensor], str]:
    """Header, tensors and the checksum that the header should have."""
    if not path.is_file():
        raise CodebookError(f"{path} does not exist.")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_HEADER_KEY)
            if text is None or len(text) > _MAX_HEADER_CHARS:
                raise CodebookError(f"{path} is a safetensors file, but not a codebook of vllm-antkv.")
            raw = json.loads(text)
            version = raw.get("format_version") if isinstance(raw, dict) else None
            if version != FORMAT_VERSION:
                raise CodebookError(
                    f"{path} has codebook format {version}, but this vllm-antkv reads format {FORMAT_VERSION}: "
                    "run `antkv calibrate` again."
                )
            header = CodebookHeader.model_validate(raw)
            if set(file.keys()) != {"k", "v"}:
                raise CodebookError(f"{path} is damaged: it holds tensors {sorted(file.keys())}, not k and v.")
            tensors = {name: file.get_tensor(name) for name in ("k", "v")}
    except (SafetensorError, ValidationError, ValueError, OSError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise CodebookError(f"{path} is not a readable codebook ({reason}).") from None
    return header, tensors, _checksum(raw, tensors)


def _check_tensors(header: CodebookHeader, k: torch.Tensor, v: torch.Tensor, path: Path) -> None:
    model = header.model
    try:
        preset = get_preset(header.preset)
        num_sub_vectors = preset.num_sub_vectors(model.head_size)
    except SettingsError as error:
        raise CodebookError(f"{path} is damaged: {error}") from None
    shape = (model.num_layers, model.num_kv_heads, num_sub_vectors, preset.num_centroids, preset.sub_vector_size)
    for name, tensor in (("k", k), ("v", v)):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float16:
            raise CodebookError(
                f"{path} is damaged: {name} is {tensor.dtype} {tuple(tensor.shape)}, but must be float16 {shape}."
            )
        if not torch.isfinite(tensor).all():
            raise CodebookError(f"{path} is damaged: {name} holds values that are not finite.")
    if header.sinks is not None:
        if header.sinks.layer >= model.num_layers or max(header.sinks.channels) >= model.hidden_size:
            raise CodebookError(f"{path} is damaged: its sink layer or channel lies outside the model.")
        if min(header.sinks.channels) < 0:
            raise CodebookError(f"{path} is damaged: its sink channels are negative.")


def _checksum(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """Over everything that is served: the header as JSON, but for its checksum, and the tensors."""
    content = {key: value for key, value in header.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _differences(have: ModelIdentity, want: ModelIdentity) -> str:
    pairs = ((name, getattr(have, name), getattr(want, name)) for name in ModelIdentity.model_fields)
    return ", ".join(f"{name} is {a}, the served model's is {b}" for name, a, b in pairs if a != b)
