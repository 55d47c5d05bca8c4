"""Measures and draws figures, each saved as it is finished, so that a killed run goes on."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from research.figures import FIGURES
from research.figures.scene import DEFAULT_PRESET, Scene
from research.figures.style import save
from research.literature.request import LiteratureRequest
from research.literature.sample import MAX_TOKENS, take_sample
from vllm_antkv import __version__
from vllm_antkv.codebook import Codebook, find_codebook
from vllm_antkv.codebook.revision import revision_of
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import CodebookError, SettingsError
from vllm_antkv.evaluate.report import versions, write_json
from vllm_antkv.evaluate.windows import load_windows
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.presets import PRESETS


@dataclass(frozen=True)
class Inspection:
    """What is looked at.

    model: folder or Hugging Face name.
    text: evaluation text, see `load_windows`.
    config: the settings of the cache; `codebooks` says where centroids are.
    calibration: text that calibrated methods learn from; without it the windows of `text` that follow those shown.
    context: tokens per window.
    max_windows: windows shown.
    """

    model: str
    text: Path
    config: AntKVConfig
    calibration: Path | None
    context: int
    max_windows: int


def inspect_model(of: Inspection, figures: Sequence[str], out: Path) -> Iterator[tuple[str, bool]]:
    """Write NAME.json, NAME.png and NAME.svg for every figure into `out`.

    A figure whose JSON is there with the same settings is not measured again, only drawn.

    Args:
        of: the model, the text and the settings.
        figures: what to draw, names of FIGURES.
        out: folder, made if it does not exist.

    Yields:
        the name of each figure as it is finished, and whether it was measured before.

    Raises:
        SettingsError: something that cannot be used, `out` included.
        CodebookError: there is no codebook for this model.
    """
    _make_folder(out)
    card, config = ModelCard.read(of.model), of.config
    card.check_context(of.context)
    windows, learned = _texts(card, of)
    card.check_windows(windows)
    card.check_windows(learned)
    codebooks = _codebooks(card, config.codebooks)
    request = LiteratureRequest(
        of.model, card.identity, None if config.codebooks is None else Path(config.codebooks), config
    )
    loaded = card.load()
    scene = Scene(card, loaded, list(codebooks), windows, request)
    settings = {
        "model": of.model,
        "weights": revision_of(of.model),
        "text": [of.text.name, _digest(windows)],
        "calibration": [(of.calibration or of.text).name, _digest(learned)],
        "context": of.context,
        "windows": len(windows),
        "codebooks": codebooks,
        "config": config.model_dump(exclude={"codebooks", "prefill_reads_cache", "kernels"}),
        "version": __version__,
    }
    for name in figures:
        numbers = _measured(out / f"{name}.json", settings)
        known = numbers is not None
        if numbers is None:
            if scene.request.sample is None:
                sample = take_sample(loaded, learned, str(of.calibration or of.text))
                scene = replace(scene, request=replace(request, sample=sample))
            numbers = json.loads(json.dumps(FIGURES[name].numbers(scene)))
            content = {"figure": name, "settings": settings, "numbers": numbers}
            write_json(out / f"{name}.json", {**content, "versions": versions("torch", "transformers")})
        save(FIGURES[name].draw(numbers), out, name)
        yield name, known


def _texts(card: ModelCard, of: Inspection) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows that are shown and windows that are learned from, both (num_windows, context) int64."""
    text, context, max_windows = of.text, of.context, of.max_windows
    wanted = max(1, MAX_TOKENS // context)
    if of.calibration is not None:
        return (
            load_windows(text, card.tokenizer, context, max_windows),
            load_windows(of.calibration, card.tokenizer, context, wanted),
        )
    windows = load_windows(text, card.tokenizer, context, max_windows + wanted)
    if len(windows) <= max_windows:
        raise SettingsError(
            f"{text} has {len(windows)} windows of {context} tokens, which leaves none to learn from: give a longer "
            "text, --calibration FILE or a smaller --max-windows."
        )
    return windows[:max_windows], windows[max_windows:]


def _codebooks(card: ModelCard, folder: str | None) -> dict[str, str]:
    """Preset -> identity of its codebook, of those that there are; CodebookError when there is none, or a bad one."""
    found = {}
    for preset in PRESETS:
        try:
            path = find_codebook(card.name, card.identity, preset, folder)
        except CodebookError:
            continue
        found[preset] = Codebook.load(path, preset, card.identity).identity
    if not found:
        # Says where one was looked for, and how to make it.
        find_codebook(card.name, card.identity, DEFAULT_PRESET, folder)
    return found


def _measured(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The numbers of an earlier run with the same settings; a file that is damaged counts as none."""
    try:
        content = json.loads(path.read_text())
        same = content["settings"] == json.loads(json.dumps(settings))
        return content["numbers"] if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(windows: torch.Tensor) -> str:
    return hashlib.sha256(windows.numpy().tobytes()).hexdigest()[:16]


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SettingsError(f"{out} cannot be written: {error.strerror}.") from None
