"""From the centroids of k-means to the files: layers are mixed, and centroids trained, where that was asked for."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vllm_antkv.calibrate.job import Job
from vllm_antkv.calibrate.mix import mix
from vllm_antkv.calibrate.train import train
from vllm_antkv.calibrate.workspace import Workspace
from vllm_antkv.codebook import Codebook, codebook_path
from vllm_antkv.offline.divergences import layer_divergences
from vllm_antkv.offline.float32_products import faster_products
from vllm_antkv.presets import PRESETS
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
    # The corrections of logits are as large as suits each layer.
    sizes = torch.from_numpy(divergences.sizes).float()
    sized = [
        replace(book, k_errors=book.k_errors * sizes[:, number, None, None])  # type: ignore[operator]
        for number, book in enumerate(books)
    ]
    made = dict(learned)
    for name, parts in job.parts.items():
        chosen = [measured.index(part) for part in parts]
        made[name] = mix(PRESETS[name], [sized[number] for number in chosen], divergences.nats.take(chosen, axis=1))
        say(f"{name}: {made[name].header.mix}")
    return [made[preset.name] for preset in job.presets]


def with_centroids_trained(job: Job, learned: Sequence[Codebook], work: Workspace) -> Iterator[Codebook]:
    """The codebooks asked for, trained where that was asked for: by `work` again, if they were before a kill."""
    steps = job.settings.train_steps
    if not steps:
        yield from learned
        return
    with job.model_again(work.folder / "weights", trains=True) as model:
        for book in learned:
            path = codebook_path(work.folder / "trained", book.preset.name)
            if not path.exists():
                with faster_products(rounded=True), progress_bar(f"Training {book.preset.name}", steps) as progress:
                    train(model, book, job.training, steps, progress.update).save(path)
            yield Codebook.load(path)


def write_codebook(job: Job, codebook: Codebook, work: Workspace) -> Path:
    """Write the file, completely or not at all."""
    path = codebook_path(job.settings.out, codebook.preset.name)
    # Whatever a kill leaves of it is then removed with the work folder.
    written = codebook_path(work.folder, codebook.preset.name)
    codebook.save(written)
    os.replace(written, path)
    return path
