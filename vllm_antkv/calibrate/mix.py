"""Bits by layer: every layer its own preset, all together in no more bytes than one preset for all.

Coarse codes hardly harm some layers and ruin others, and which ones depends on the model
(`docs/research/ablations.md`). The presets that make the sum of the layers' divergences least are chosen
(`offline.divergences`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from vllm_antkv.codebook import Codebook
from vllm_antkv.presets import Preset

#: Divergences below this part of the largest count as this much.
_LEAST = 1e-9


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


def smoothed(divergences: np.ndarray) -> np.ndarray:
    """Half of the way, in logarithms, to costs that are a factor of the layer times one of the choice.

    A few tokens decide what is measured of one layer with one preset. What its other presets cost says as much of it.

    Args:
        divergences: (num_layers, num_choices).
    """
    logs = np.log(np.maximum(divergences, max(_LEAST * divergences.max(), np.finfo(float).tiny)))
    products = logs.mean(0) + logs.mean(1, keepdims=True) - logs.mean()
    return np.exp((logs + products) / 2)  # type: ignore[no-any-return]


def mix(preset: Preset, parts: Sequence[Codebook], divergences: np.ndarray) -> Codebook:
    """The best codebook for a preset that the layers of several make up.

    Args:
        preset: what all layers together may cost.
        parts: codebooks of one preset each.
        divergences: (num_layers, num_parts), as from `offline.divergences`.
    """
    divergences, head_size = smoothed(divergences), parts[0].header.model.head_size
    costs = [book.preset.code_bytes(head_size) for book in parts]
    chosen = choose(divergences, costs, len(divergences) * preset.code_bytes(head_size))
    expected = float(divergences[np.arange(len(chosen)), chosen].sum())
    return _made_of([parts[number] for number in chosen], preset, expected)


def _made_of(layers: Sequence[Codebook], preset: Preset, divergence: float) -> Codebook:
    """Layer by layer from these codebooks, at this divergence together."""
    header = layers[0].header
    names = tuple(book.preset.name for book in layers)
    different = None if set(names) == {preset.name} else names
    orders = {name: order for book in layers for name, order in book.header.k_orders.items()}
    errors = [book.k_errors[index] for index, book in enumerate(layers) if book.k_errors is not None]
    calibration = {**header.calibration, "divergence_of_mix": divergence}
    update = {"preset": preset.name, "layers": different, "k_orders": orders, "calibration": calibration}
    return replace(
        layers[0],
        header=header.model_copy(update=update),
        k=tuple(book.k[index] for index, book in enumerate(layers)),
        v=tuple(book.v[index] for index, book in enumerate(layers)),
        k_errors=torch.stack(errors) if len(errors) == len(layers) else None,
    )
