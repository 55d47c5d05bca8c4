"""From the centroids of k-means to the files: layers are mixed, and centroids trained, where that was asked for."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from vllm_antkv.calibrate.job import Job
from vllm_antkv.calibrate.mix import mix
from vllm_antkv.calibrate.train import train
from vllm_antkv.calibrate.workspace import Workspace
from vllm_antkv.codebook import Codebook, codebook_path
from vllm_antkv.offline.divergences import layer_divergences
from vllm_antkv.offline.float32_products import faster_products
from vllm_antkv.presets import Preset
from vllm_antkv.progress import progress_bar, say


def with_layers_mixed(job: Job, learned: Mapping[str, Codebook], work: Workspace) -> list[Codebook]:
    """The codebooks asked for: mixes of the layers of all that were learned, where bits are mixed."""
    if not job.parts:
        return [learned[preset.name] for preset in job.presets]
    measured = list(dict.fromkeys(part for parts in job.parts.values() for part in parts))
    books = [learned[part.name] for part in measured]
    num_steps = len(job.judging) * books[0].header.model.num_layers
    with job.model_again(work.folder / "weights") as model, progress_bar("Measuring layers", num_steps) as progress:
        divergences = layer_divergences(model, books, job.judging, progress.update)
    found = {part.name: divergences.nats[:, number] for number, part in enumerate(measured)}
    sized = {
        part.name: _sized(book, divergences.sizes[:, number])
        for number, (part, book) in enumerate(zip(measured, books, strict=True))
    }
    return [
        _mixed(preset, [sized[part.name] for part in job.parts[preset.name]], found)
        if preset.name in job.parts
        else learned[preset.name]
        for preset in job.presets
    ]


def with_centroids_trained(job: Job, learned: Sequence[Codebook], work: Workspace) -> Iterator[Codebook]:
    """The codebooks asked for, trained where that was asked for: by `work` again, if they were before a kill."""
    if not job.settings.train_steps:
        yield from learned
        return
    with job.model_again(work.folder / "weights", trains=True) as model:
        for book in learned:
            path = codebook_path(work.folder / "trained", book.preset.name)
            if not path.exists():
                _trained(job, model, book).save(path)
            yield Codebook.load(path)


def _trained(job: Job, model: PreTrainedModel, book: Codebook) -> Codebook:
    steps = job.settings.train_steps
    with faster_products(rounded=True), progress_bar(f"Training {book.preset.name}", steps) as progress:
        return train(model, book, job.training, steps, progress.update)


def write_codebook(job: Job, codebook: Codebook, work: Workspace) -> Path:
    """Write the file, completely or not at all."""
    path = codebook_path(job.settings.out, codebook.preset.name)
    # Whatever a kill leaves of it is then removed with the work folder.
    written = codebook_path(work.folder, codebook.preset.name)
    codebook.save(written)
    os.replace(written, path)
    return path


def _sized(book: Codebook, sizes: np.ndarray) -> Codebook:
    """With the corrections of its layers as large as these, (num_layers,), say."""
    assert book.k_errors is not None
    return replace(book, k_errors=book.k_errors * torch.from_numpy(sizes).float()[:, None, None])


def _mixed(preset: Preset, parts: Sequence[Codebook], divergences: Mapping[str, np.ndarray]) -> Codebook:
    """The best mix for one preset, and a word about it.

    divergences: (num_layers,) of each part, by its preset.
    """
    codebook = mix(preset, parts, np.stack([divergences[book.preset.name] for book in parts], axis=1))
    say(f"{preset.name}: {codebook.header.mix}")
    return codebook
