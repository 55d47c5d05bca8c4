"""The JSON header of a codebook file, and its checks.

The file is untrusted input: every field is validated, and messages show values shortened and escaped.
"""

import json
import reprlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from vllm_antkv import __version__
from vllm_antkv.codebook.identity import MAX_LAYERS, ModelIdentity
from vllm_antkv.errors import CodebookError, first_problem
from vllm_antkv.presets import LAYER_PRESETS, PRESETS, Preset

FORMAT_VERSION = 1


class SinkRule(BaseModel, frozen=True, extra="forbid"):
    """KVSink: after decoder layer `layer`, a token is a sink when |hidden[c]| > threshold for a c in `channels`."""

    layer: int = Field(ge=0)
    channels: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    threshold: float = Field(gt=0, allow_inf_nan=False)


class RopeLayout(BaseModel, frozen=True, extra="forbid"):
    """RoPE of a layer: it rotates the first `rotary_dim` channels of K; 0: the layer has no RoPE.

    neighbours: a rotary pair is two neighbouring channels (GPT-J), else channels half of `rotary_dim` apart (Llama).
    """

    rotary_dim: int = Field(default=0, ge=0)
    neighbours: bool = False

    def __str__(self) -> str:
        """What such a layer does, for messages."""
        if not self.rotary_dim:
            return "does not rotate K"
        return f"rotates {self.rotary_dim} channels of K in pairs of {'neighbours' if self.neighbours else 'halves'}"


class CodebookHeader(BaseModel, frozen=True, extra="forbid"):
    """The JSON header of a codebook file."""

    format_version: int
    preset: str
    model: ModelIdentity
    # Preset of every layer where they differ (`calibrate.mix`); None: all have `preset`.
    layers: Annotated[tuple[str, ...], Field(max_length=MAX_LAYERS)] | None = None
    sinks: SinkRule | None
    # By preset: the order in which sub-vectors take the channels of K (`ops.rope.interleaved`); without one, the
    # model's order.
    k_orders: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = Field(default_factory=dict)
    # RoPE of every layer; None: not recorded, as in older files.
    turns: Annotated[tuple[RopeLayout, ...], Field(max_length=MAX_LAYERS)] | None = None
    # In files of versions that could train one; always null, and not written.
    prefix: None = Field(default=None, exclude=True)
    calibration: dict[str, Any]
    antkv_version: str = __version__
    checksum: str = ""

    @property
    def layer_presets(self) -> tuple[Preset, ...]:
        """The preset of every layer."""
        names = (self.preset,) * self.model.num_layers if self.layers is None else self.layers
        return tuple(LAYER_PRESETS[name] for name in names)

    @property
    def mix(self) -> str:
        """Which layers have which preset, in words."""
        layers: dict[str, list[str]] = {}
        for index, preset in enumerate(self.layer_presets):
            layers.setdefault(preset.name, []).append(str(self.model.decoder_indices[index]))
        return "; ".join(f"{name} in layers {', '.join(layers[name])}" for name in LAYER_PRESETS if name in layers)

    def rope(self, layer: int) -> RopeLayout | None:
        """RoPE of a layer; None: not recorded."""
        return None if self.turns is None else self.turns[layer]

    def k_order(self, layer: int) -> tuple[int, ...] | None:
        """The order of K's channels in a layer; None: the model's."""
        return self.k_orders.get(self.layer_presets[layer].name)


def parse_header(text: str | None, path: Path) -> tuple[dict[str, Any], CodebookHeader]:
    """The raw JSON header and the parsed one; ValueError when it is not JSON."""
    if text is None:
        raise CodebookError(f"{path} is a safetensors file, but not a codebook of vllm-antkv.")
    raw = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise CodebookError(
            f"{path} has codebook format {reprlib.repr(version)}, but this vllm-antkv reads format {FORMAT_VERSION}: "
            "run `antkv calibrate` again."
        )
    try:
        return raw, CodebookHeader.model_validate_json(text, strict=True)
    except ValidationError as error:
        field, problem = first_problem(error, whole="header")
        raise CodebookError(f"{path} is damaged: {field} of its header is not usable ({problem}).") from None


def check_header(header: CodebookHeader, path: Path) -> None:
    """CodebookError when parts of the header contradict each other."""
    model, sinks = header.model, header.sinks
    if header.preset not in PRESETS:
        shown = reprlib.repr(header.preset)
        raise CodebookError(f"{path} is for the preset {shown}, which is none of {', '.join(PRESETS)}.")
    names = header.layers
    if names is not None and (len(names) != model.num_layers or not set(names) <= set(LAYER_PRESETS)):
        raise CodebookError(
            f"{path} is damaged: its layers are not one preset for each of the model's {model.num_layers}."
        )
    used = {PRESETS[header.preset], *header.layer_presets}
    for preset in used:
        if model.head_size % preset.sub_vector_size:
            raise CodebookError(f"{path} is damaged: {preset.name} does not divide its head size {model.head_size}.")
    budget = model.num_layers * PRESETS[header.preset].code_bytes(model.head_size)
    if sum(preset.code_bytes(model.head_size) for preset in header.layer_presets) > budget:
        raise CodebookError(f"{path} is damaged: its layers take more bytes together than {header.preset}.")
    for name, order in header.k_orders.items():
        if name not in {preset.name for preset in used} or sorted(order) != list(range(model.head_size)):
            raise CodebookError(
                f"{path} is damaged: its k_orders have for {reprlib.repr(name)} no order of the {model.head_size} "
                "channels of a head."
            )
    if header.turns is not None:
        widest = max((turn.rotary_dim for turn in header.turns), default=0)
        if len(header.turns) != model.num_layers or widest > model.head_size:
            raise CodebookError(f"{path} is damaged: its turns are not one for each of the model's layers.")
    indices = list(model.decoder_indices)
    if indices != sorted(set(indices)) or len(indices) != model.num_layers:
        raise CodebookError(f"{path} is damaged: its attention_layers are not {model.num_layers} in ascending order.")
    if sinks is not None and (sinks.layer > indices[-1] or max(sinks.channels) >= model.hidden_size):
        raise CodebookError(f"{path} is damaged: its sink layer or channel lies outside the model.")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys: readers differ in which of two values they take."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key of its header stands there twice")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} in its header is no JSON")
