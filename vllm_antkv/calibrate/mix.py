"""Bits by layer: every layer its own preset, all together in no more bytes than one preset for all.

Coarse codes hardly harm some layers and ruin others, and which ones is the model's own (`docs/ablations.md`). Each
layer is measured alone: the divergence of the model's predictions when that layer's K and V go through a preset's codes
and everything else stays exact. The presets that make the sum of these least are chosen, and are kept if the whole
model is then better than with one preset, on text that no centroid was learned from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from transformers import PreTrainedModel

from vllm_antkv.codebook import Codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods.base import Method, Quantiser
from vllm_antkv.evaluate.methods.vector_quantiser import VectorQuantiser
from vllm_antkv.evaluate.perplexity import score
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import PRESETS, Preset

#: Everything but the codes is as the server's defaults have it.
_SERVED = AntKVConfig()


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


def layer_divergences(
    model: PreTrainedModel,
    books: Sequence[Codebook],
    windows: torch.Tensor,
    known: Mapping[str, float],
    keep: Callable[[Mapping[str, float]], object],
    advance: Callable[[], object],
) -> np.ndarray:
    """The divergence when one layer goes through the codes of one codebook, for all of both.

    Args:
        model: in evaluation mode.
        books: of one preset each.
        windows: (num_windows, seq_len) int64.
        known: results of an earlier run, by place.
        keep: called after every place with all results so far.
        advance: called after every place.

    Returns:
        (num_layers, num_books) float64, nats per token.
    """
    num_layers = books[0].header.model.num_layers
    found = dict(known)
    for layer, book in product(range(num_layers), books):
        if (place := _place(layer, book)) not in found:
            found[place] = _divergence(model, book, _OneLayer(VectorQuantiser(book), layer), windows)
            keep(found)
        advance()
    return np.array([[found[_place(layer, book)] for book in books] for layer in range(num_layers)])


def _place(layer: int, book: Codebook) -> str:
    return f"{layer}/{book.preset.name}"


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
        divergences: (num_layers, num_books), as from `layer_divergences`.
        windows: (num_windows, seq_len) int64 that judge; no centroid was learned from them.
    """
    uniform, parts = books[preset.name], list(books.values())
    head_size = uniform.header.model.head_size
    costs = [book.preset.code_bytes(head_size) for book in parts]
    chosen = choose(divergences, costs, len(divergences) * preset.code_bytes(head_size))
    mixed = _made_of([parts[number] for number in chosen], uniform)
    before, after = (_divergence(model, book, VectorQuantiser(book), windows) for book in (uniform, mixed))
    return Mixed(uniform, (before, before)) if after >= before else Mixed(mixed, (before, after))


def _made_of(layers: Sequence[Codebook], uniform: Codebook) -> Codebook:
    """Layer by layer from these codebooks, under the header of `uniform`."""
    names = tuple(book.preset.name for book in layers)
    orders = {name: order for book in layers for name, order in book.header.k_orders.items()}
    k, v = (
        tuple(centroids[index] for index, centroids in enumerate(books))
        for books in ([book.k for book in layers], [book.v for book in layers])
    )
    return replace(uniform, header=uniform.header.model_copy(update={"layers": names, "k_orders": orders}), k=k, v=v)


def _divergence(model: PreTrainedModel, book: Codebook, quantiser: Quantiser, windows: torch.Tensor) -> float:
    method = Method(book.preset.name, book.preset.nominal_bits, _SERVED, quantiser, sinks=book.header.sinks)
    fidelity = score(model, method, windows, against_own=True).fidelity
    assert fidelity is not None
    return fidelity.kl


@dataclass(frozen=True)
class _OneLayer:
    """All other layers keep their rows as they are."""

    quantiser: Quantiser
    layer: int

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        if layer == self.layer:
            return self.quantiser.read_back(layer, key, value, rotary)
        return key.clone(), value.clone()
