"""Whether a model can be served, which codebooks fit it, and which kernels would run its layers here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vllm_antkv.codebook import Codebook, ModelIdentity, NoCodebookError, find_codebook
from vllm_antkv.doctor.finding import Finding, State
from vllm_antkv.errors import AntKVError, SettingsError
from vllm_antkv.families import SERVED_ARCHITECTURES
from vllm_antkv.features import has_plain_logits, unserved_feature
from vllm_antkv.layer_windows import layer_windows
from vllm_antkv.presets import PRESETS
from vllm_antkv.slow_bfloat16 import REMEDY, slow_bfloat16


def check_model(model: str, codebooks: str | None) -> Iterator[Finding]:
    """Whether the model is supported, and which presets have a codebook that fits it."""
    from vllm_antkv.offline.pretrained import described, read_config

    try:
        config = read_config(model, SettingsError)
        identity = ModelIdentity.from_hf_config(config)
        described(config, SettingsError)
    except AntKVError as error:
        remedy = "Give the folder of a Hugging Face causal language model, or its name on the hub."
        yield Finding("config", "problem", str(error), remedy)
        return
    yield _architecture(identity, model, config)
    if not torch.cuda.is_available() and (slow := slow_bfloat16(config.dtype)):
        yield Finding("dtype", "note", slow, REMEDY)
    yield from _codebooks(model, config, identity, codebooks)


def _architecture(identity: ModelIdentity, model: str, config: Any) -> Finding:
    detail = (
        f"{identity.architecture}: {identity.num_layers} layers, {identity.num_kv_heads} KV heads, "
        f"head size {identity.head_size}"
    )
    if feature := unserved_feature(config.get_text_config()):
        return Finding("architecture", "problem", f"{detail}; {feature}", "Serve it with --kv-cache-dtype auto.")
    if identity.architecture in SERVED_ARCHITECTURES:
        return Finding("architecture", "ok", detail)
    remedy = f"antkv doctor {model} --verify compares what it answers with --kv-cache-dtype auto."
    return Finding("architecture", "note", f"{detail}; not among the tested ones", remedy)


def _codebooks(model: str, config: Any, identity: ModelIdentity, codebooks: str | None) -> Iterator[Finding]:
    """Those that there are, with the kernels that they would run on, and one line of presets that have none."""
    missing: list[str] = []
    states: set[State] = set()
    for preset in PRESETS:
        try:
            finding, codebook = _codebook(model, identity, preset, codebooks)
        except NoCodebookError:
            missing.append(preset)
            continue
        states.add(finding.state)
        yield finding
        if codebook is not None:
            yield check_layers(config, codebook, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if missing:
        preset = "antkv-1bit" if "antkv-1bit" in missing else missing[0]
        remedy = f"Make one with `antkv calibrate {model} --preset {preset} --out {codebooks or 'DIR'}`."
        where = f"in {codebooks}" if codebooks else "yet: a server learns the one it needs at its first start"
        state: State = "problem" if codebooks and "ok" not in states else "note"
        yield Finding("codebooks", state, f"none for {', '.join(missing)} {where}", remedy)
    elif "ok" not in states:
        yield Finding("codebooks", "problem", "no preset can be served", "Serve this model with --kv-cache-dtype auto.")


def _codebook(
    model: str, identity: ModelIdentity, preset: str, codebooks: str | None
) -> tuple[Finding, Codebook | None]:
    """And what is said of it."""
    try:
        PRESETS[preset].num_sub_vectors(identity.head_size)
        path = find_codebook(model, identity, preset, codebooks)
    except NoCodebookError:
        raise
    except AntKVError as error:
        return Finding(preset, "note", str(error)), None
    try:
        codebook = Codebook.load(path, preset, identity)
    except AntKVError as error:
        return Finding(preset, "problem", str(error), f"Remove {path} or calibrate again."), None
    sinks = codebook.header.sinks
    described = "no sink rule" if sinks is None else f"sinks from layer {sinks.layer}, channels {list(sinks.channels)}"
    if codebook.header.layers is not None:
        described += f", {codebook.header.mix}"
    detail = f"{path} ({codebook.identity}, {codebook.num_bytes / 2**20:.1f} MiB, {described})"
    return Finding(preset, "ok", detail), codebook


def check_codebooks(folder: Path) -> Iterator[Finding]:
    """Every codebook in a folder, without a model to compare with."""
    try:
        paths = sorted(folder.glob("*.safetensors"))
    except OSError as error:
        yield Finding("codebooks", "problem", f"cannot be looked for ({error.strerror})", "Name another folder.")
        return
    if not paths:
        yield Finding(str(folder), "problem", "holds no codebook", "Name the folder given to `antkv calibrate --out`.")
    for path in paths:
        try:
            header = Codebook.load(path).header
        except AntKVError as error:
            yield Finding(path.name, "problem", str(error), "Calibrate again.")
        else:
            model = header.model
            detail = f"{header.preset} for {model.architecture}, {model.num_layers} layers, head size {model.head_size}"
            yield Finding(path.name, "ok", detail)


def check_layers(config: Any, codebook: Codebook, device: torch.device) -> Finding:
    """The kernels of each layer, and what faster ones lack.

    Args:
        config: of the model.
        codebook: that would be served.
        device: that would have the pages.
    """
    from vllm_antkv.ops.dispatch import cautions, choose, summary
    from vllm_antkv.ops.layer import LayerKind

    text_config, model = config.get_text_config(), codebook.header.model
    dtype, group = getattr(config, "dtype", None), model.num_attention_heads // model.num_kv_heads
    kinds = {
        index: LayerKind(
            preset,
            model.head_size,
            group,
            dtype if isinstance(dtype, torch.dtype) else torch.bfloat16,
            rotary=None,
            plain_logits=window is None and has_plain_logits(text_config),
        )
        for index, preset, window in zip(
            model.decoder_indices, codebook.header.layer_presets, layer_windows(text_config), strict=True
        )
    }
    chosen = dict(zip(kinds, choose("auto", device, list(kinds.values())), strict=True))
    what = f"kernels, {codebook.header.preset}"
    slower = list(cautions(chosen))
    return Finding(what, "note" if slower else "ok", summary(chosen), " ".join(slower))
