"""From the centroids of k-means to the files: layers are mixed, the prefix trained, as was asked."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from vllm_antkv.calibrate.job import Job
from vllm_antkv.calibrate.mix import mix
from vllm_antkv.calibrate.prefix import STEPS as PREFIX_STEPS
from vllm_antkv.calibrate.prefix import train_prefix
from vllm_antkv.calibrate.progress import progress_bar, say
from vllm_antkv.calibrate.texts import with_prefix
from vllm_antkv.calibrate.training import Schedule, split
from vllm_antkv.calibrate.workspace import Workspace
from vllm_antkv.codebook import Codebook, codebook_path
from vllm_antkv.codebook.prefix import TrainedPrefix
from vllm_antkv.offline.divergences import layer_divergences
from vllm_antkv.presets import Preset

#: Windows on which layers are measured: their order hardly changes with more.
_MEASURED_WINDOWS = 2


def with_layers_mixed(job: Job, learned: Mapping[str, Codebook], work: Workspace) -> list[Codebook]:
    """The codebooks asked for: mixes of the layers of all that were learned, where bits are mixed."""
    if not job.parts:
        return [learned[preset.name] for preset in job.presets]
    measured = list(dict.fromkeys(part for parts in job.parts.values() for part in parts))
    books = [learned[part.name] for part in measured]
    windows = split(job.windows)[0][:_MEASURED_WINDOWS]
    num_steps = len(windows) * books[0].header.model.num_layers
    with job.model_again(work.folder / "weights") as model, progress_bar("Measuring layers", num_steps) as progress:
        divergences = layer_divergences(model, books, windows, progress.update)
    found = {part.name: divergences[:, number] for number, part in enumerate(measured)}
    return [
        _mixed(preset, [learned[part.name] for part in job.parts[preset.name]], found)
        if preset.name in job.parts
        else learned[preset.name]
        for preset in job.presets
    ]


def write_codebook(job: Job, codebook: Codebook, work: Workspace) -> Path:
    """Train the prefix where that was asked for, and write the file."""
    if job.prefix:
        prefix, loss = _train_prefix(job, codebook, work)
        codebook = codebook.with_prefix(prefix).recording(prefix_loss=loss)
    path = codebook_path(job.settings.out, codebook.preset.name)
    # Whatever a kill leaves of it is then removed with the work folder.
    written = codebook_path(work.folder, codebook.preset.name)
    codebook.save(written)
    os.replace(written, path)
    return path


def _mixed(preset: Preset, parts: Sequence[Codebook], divergences: Mapping[str, np.ndarray]) -> Codebook:
    """The best mix for one preset, and a word about it.

    divergences: (num_layers,) of each part, by its preset.
    """
    codebook = mix(preset, parts, np.stack([divergences[book.preset.name] for book in parts], axis=1))
    say(f"{preset.name}: {codebook.header.mix}")
    return codebook


def _train_prefix(job: Job, codebook: Codebook, work: Workspace) -> tuple[TrainedPrefix | None, tuple[float, float]]:
    """Train the prefix of one preset."""
    name = codebook.preset.name
    with (
        job.model_again(work.folder / "weights") as model,
        progress_bar(f"Training the prefix for {name}", PREFIX_STEPS) as progress,
    ):
        work_name = f"{name}-prefix"
        keep = partial(work.save_training, work_name)
        schedule = Schedule(PREFIX_STEPS, job.settings.seed, work.training(work_name), keep, progress.update)
        windows = with_prefix(job.windows, job.prefix)
        prefix, (before, after) = train_prefix(model, codebook, job.prefix, windows, schedule)
    kept = "" if prefix else " (not better: no trained prefix is kept)"
    say(f"{name}: layer-wise error on held-out text {before:.5g} -> {after:.5g}{kept}")
    return prefix, (before, after)
