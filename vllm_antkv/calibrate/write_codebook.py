"""From the centroids of k-means to the files: layers are mixed, centroids refined, the prefix trained, as was asked."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from vllm_antkv.calibrate.job import Job
from vllm_antkv.calibrate.mix import can_be_mixed, mix
from vllm_antkv.calibrate.prefix import STEPS as PREFIX_STEPS
from vllm_antkv.calibrate.prefix import train_prefix
from vllm_antkv.calibrate.progress import progress_bar, say
from vllm_antkv.calibrate.refine import Refined
from vllm_antkv.calibrate.refine import refine as refine_centroids
from vllm_antkv.calibrate.texts import with_prefix
from vllm_antkv.calibrate.training import Schedule, split
from vllm_antkv.calibrate.workspace import Workspace
from vllm_antkv.codebook import Codebook, codebook_path
from vllm_antkv.codebook.prefix import TrainedPrefix
from vllm_antkv.offline.divergences import layer_divergences
from vllm_antkv.presets import Preset


def with_layers_mixed(job: Job, learned: Mapping[str, Codebook], work: Workspace) -> list[Codebook]:
    """The codebooks asked for: mixes of the layers of all that were learned, where bits are mixed."""
    if not job.parts:
        return [learned[preset.name] for preset in job.presets]
    books = list(learned.values())
    num_places = job.identity.num_layers * len(books)
    held_out, _ = split(job.windows)
    with job.reloaded_model() as model:
        with progress_bar("Measuring layers", num_places) as progress:
            known = work.measured()
            divergences = layer_divergences(model, books, held_out, known, work.set_measured, progress.update)
        return [
            _mixed_for(model, preset, learned, divergences, held_out)
            if can_be_mixed(preset, [book.preset for book in books])
            else learned[preset.name]
            for preset in job.presets
        ]


def write_codebook(job: Job, codebook: Codebook, work: Workspace) -> Path:
    """Train what is to be trained, and write the file."""
    if job.settings.refine:
        refined = _refine(job, codebook, work)
        codebook = _recorded(refined.codebook, divergence=refined.divergence)
    if job.prefix:
        prefix, loss = _train_prefix(job, codebook, work)
        codebook = _recorded(codebook.with_prefix(prefix), prefix_loss=loss)
    path = codebook_path(job.settings.out, codebook.preset.name)
    # Whatever a kill leaves of it is then removed with the work folder.
    written = codebook_path(work.folder, codebook.preset.name)
    codebook.save(written)
    os.replace(written, path)
    return path


def _mixed_for(
    model: Any, preset: Preset, learned: Mapping[str, Codebook], divergences: np.ndarray, held_out: torch.Tensor
) -> Codebook:
    """The best mix for one preset."""
    mixed = mix(model, preset, learned, divergences, held_out)
    before, after = mixed.divergence
    layers = "not better: all layers keep the preset" if after >= before else mixed.codebook.header.mix
    say(f"{preset.name}: divergence on held-out text {before:.3g} -> {after:.3g} nats per token ({layers})")
    return _recorded(mixed.codebook, divergence_of_mix=mixed.divergence)


def _recorded(codebook: Codebook, **values: Any) -> Codebook:
    """With more of the calibration in its header."""
    record = {**codebook.header.calibration, **values}
    return replace(codebook, header=codebook.header.model_copy(update={"calibration": record}))


def _refine(job: Job, codebook: Codebook, work: Workspace) -> Refined:
    """Train the centroids of one preset."""
    name = codebook.preset.name
    with job.reloaded_model() as model, progress_bar(f"Refining {name}", job.settings.refine) as progress:
        schedule = _schedule(job, job.settings.refine, work, f"{name}-centroids", progress)
        refined = refine_centroids(model, codebook, job.windows, schedule)
    before, after = refined.divergence
    kept = "" if after < before else " (not better: the centroids of k-means are kept)"
    say(f"{name}: divergence on held-out text {before:.4f} -> {after:.4f} nats per token{kept}")
    return refined


def _train_prefix(job: Job, codebook: Codebook, work: Workspace) -> tuple[TrainedPrefix | None, tuple[float, float]]:
    """Train the prefix of one preset."""
    name = codebook.preset.name
    with job.reloaded_model() as model, progress_bar(f"Training the prefix for {name}", PREFIX_STEPS) as progress:
        schedule = _schedule(job, PREFIX_STEPS, work, f"{name}-prefix", progress)
        windows = with_prefix(job.windows, job.prefix)
        prefix, (before, after) = train_prefix(model, codebook, job.prefix, windows, schedule)
    kept = "" if prefix else " (not better: no trained prefix is kept)"
    say(f"{name}: layer-wise error on held-out text {before:.5g} -> {after:.5g}{kept}")
    return prefix, (before, after)


def _schedule(job: Job, steps: int, work: Workspace, name: str, progress: tqdm) -> Schedule:
    return Schedule(steps, job.settings.seed, work.training(name), partial(work.save_training, name), progress.update)
