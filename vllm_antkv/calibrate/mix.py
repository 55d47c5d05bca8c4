"""Bits by layer: every layer its own preset, all together in no more bytes than one preset for all.

Coarse codes hardly harm some layers and ruin others, and which ones depends on the model
(`docs/research/ablations.md`). Each layer is measured alone: the divergence of the model's predictions when that
layer's K and V go through a preset's codes and everything else stays exact. The presets that make the sum of these
least are chosen, and are kept if the whole model is then better than with one preset, on text that no centroid was
learned from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from transformers import PreTrainedModel

from vllm_antkv.codebook import Codebook
from vllm_antkv.offline.divergences import divergence
from vllm_antkv.offline.vector_quantiser import VectorQuantiser
from vllm_antkv.presets import PRESETS, Preset


@dataclass(frozen=True)
class Mixed:
    """A codebook as it came or, where mixing helped, with a preset for every layer.

    divergence: on the windows held out, with one preset and with the codebook, in nats per token.
    """

    codebook: Codebook
    divergence: tuple[float, float]


def parts_of_mix(presets: Sequence[Preset], head_size: int, num_tokens: int) -> list[Preset]:
    """The presets whose centroids a mix for one of `presets` may take; empty where none can be mixed.

    Args:
        presets: those asked for.
        head_size: sub-vectors must divide it.
        num_tokens: to cluster; tables of more centroids are left out.
    """
    parts = [
        preset
        for preset in PRESETS.values()
        if head_size % preset.sub_vector_size == 0 and preset.num_centroids <= num_tokens
    ]
    return parts if any(can_be_mixed(preset, parts) for preset in presets) else []


def can_be_mixed(preset: Preset, parts: Sequence[Preset]) -> bool:
    """Whether there are cheaper presets to save with and dearer ones to spend on."""
    bits = [part.nominal_bits for part in parts]
    return bool(bits) and min(bits) < preset.nominal_bits < max(bits)


def choose(divergences: np.ndarray, costs: Sequence[int], budget: int) -> list[int]:
    """The column for each row that makes the sum of the divergences least within the budget.

    Args:
        divergences: (num_layers, num_choices).
        costs: of each choice, in any layer.
        budget: for all layers; at least the cheapest choice for each.
    """
    num_layers, num_choices = divergences.shape
    one_each = np.kron(np.eye(num_layers), np.ones(num_choices))
    solved = milp(
        # The solver's tolerances are absolute.
        divergences.flatten() / max(divergences.max(), np.finfo(float).tiny),
        integrality=np.ones(divergences.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(np.tile(np.asarray(costs, float), num_layers), ub=budget),
        ],
    )
    return solved.x.reshape(divergences.shape).argmax(axis=1).tolist()


def mix(
    model: PreTrainedModel,
    preset: Preset,
    books: Mapping[str, Codebook],
    divergences: np.ndarray,
    windows: torch.Tensor,
) -> Mixed:
    """The best codebook for a preset that the layers of several make up.

    Args:
        model: in evaluation mode.
        preset: what all layers together may cost.
        books: codebooks of one preset each, by its name; one is of `preset`.
        divergences: (num_layers, num_books), as from `offline.divergences`.
        windows: (num_windows, seq_len) int64 that judge; no centroid was learned from them.
    """
    uniform, parts = books[preset.name], list(books.values())
    head_size = uniform.header.model.head_size
    costs = [book.preset.code_bytes(head_size) for book in parts]
    chosen = choose(divergences, costs, len(divergences) * preset.code_bytes(head_size))
    mixed = _made_of([parts[number] for number in chosen], uniform)
    before, after = (divergence(model, book, VectorQuantiser(book), windows) for book in (uniform, mixed))
    return Mixed(uniform, (before, before)) if after >= before else Mixed(mixed, (before, after))


def _made_of(layers: Sequence[Codebook], uniform: Codebook) -> Codebook:
    """Layer by layer from these codebooks, under the header of `uniform`."""
    names = tuple(book.preset.name for book in layers)
    orders = {name: order for book in layers for name, order in book.header.k_orders.items()}
    k, v = (
        tuple(centroids[index] for index, centroids in enumerate(books))
        for books in ([book.k for book in layers], [book.v for book in layers])
    )
    header = uniform.header.model_copy(update={"layers": names, "k_orders": orders})
    errors = [None if book.k_errors is None else book.k_errors[index] for index, book in enumerate(layers)]
    known = [each for each in errors if each is not None]
    return replace(uniform, header=header, k=k, v=v, k_errors=torch.stack(known) if len(known) == len(errors) else None)
