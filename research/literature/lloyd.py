"""Scalar quantisers with levels of their own choosing: the best levels for a sample, and rounding to them."""

import torch
from torch.nn import functional

_MAX_ITERATIONS = 300


def lloyd_max(values: torch.Tensor, bits: int) -> torch.Tensor:
    """2^bits levels with the least mean squared error on each sample: k-means in one dimension (Lloyd, Max).

    Sorted values and their running sums make an iteration cost nothing, so that many samples are solved at once, which
    scikit-learn's k-means does one by one. Starts from quantiles; the same input gives the same levels.

    Args:
        values: (num_samples, num_values) floating point.
        bits: log2 of the number of levels.

    Returns:
        (num_samples, 2^bits) ascending, same dtype.
    """
    ordered = values.double().sort(dim=-1).values
    num_values, num_levels = ordered.shape[-1], 2**bits
    sums = functional.pad(ordered.cumsum(-1), (1, 0))
    levels = ordered[:, ((torch.arange(num_levels) + 0.5) * num_values / num_levels).long()]
    for _ in range(_MAX_ITERATIONS):
        inner = torch.searchsorted(ordered, _middles(levels))
        cuts = functional.pad(functional.pad(inner, (0, 1), value=num_values), (1, 0))
        counts = cuts.diff(dim=-1)
        moved = torch.where(counts > 0, sums.gather(-1, cuts).diff(dim=-1) / counts, levels)
        if torch.equal(moved, levels):
            break
        levels = moved
    return levels.to(values)


def round_to_levels(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Replace each value by the nearest level.

    Args:
        values: (num_samples, num_values).
        levels: (num_samples or 1, num_levels) ascending.
    """
    levels = levels.expand(len(values), -1).contiguous()
    return levels.gather(-1, torch.searchsorted(_middles(levels), values.contiguous()))


def _middles(levels: torch.Tensor) -> torch.Tensor:
    return (levels[:, 1:] + levels[:, :-1]) / 2
