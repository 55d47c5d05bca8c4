"""Centroids in bytes: how near they are to the centroids, and what is said of that."""

import pytest
import torch

from vllm_antkv.ops.byte_tables import LANES, byte_tables


def draw(size: int) -> torch.Tensor:
    """(2, 3, 4096, size), one of them far from all others, one in the middle."""
    centroids = torch.randn(2, 3, 4096, size, generator=torch.Generator().manual_seed(size)).half()
    centroids[:, :, 7] *= 1e4
    centroids[:, :, 9] = centroids.float().median(2).values.half()
    return centroids


def taken_apart(blocks: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Half the squared norms, units, (2, 3, 4096), and whole numbers, (2, 3, 4096, size), as the kernels read them."""
    norms, units, numbers = blocks.split([4 * LANES, 4 * LANES, LANES * size], -1)
    norms, units = (part.contiguous().view(torch.float32).flatten(2) for part in (norms, units))
    whole = numbers.unflatten(-1, (size // 4, LANES, 4)).transpose(3, 4).reshape(2, 3, 4096, size)
    return norms.double(), units.double(), whole.double() - 128


@pytest.mark.parametrize("size", [16, 32])
def test_bytes_are_half_a_unit_away_at_most(size):
    centroids = draw(size)
    tables = byte_tables(centroids)
    norms, units, whole = taken_apart(tables.bytes, size)
    rest = centroids.double() - tables.middles.double()[:, :, None]
    lost = rest - whole * units[..., None]
    # 127 units of float32 may be a little less than the largest number.
    assert (lost.abs() <= (0.5 + 1e-4) * units[..., None]).all()
    torch.testing.assert_close(norms, rest.square().sum(-1) / 2, rtol=1e-6, atol=0)
    # Each has its own unit: one that dwarfs the others takes nothing from them.
    assert units[:, :, 7].min() > 1000 * units[:, :, 10:].max()
    assert (units[:, :, 9] == 0).all()


@pytest.mark.parametrize("size", [16, 32])
def test_limits_are_the_largest(size):
    centroids = draw(size)
    tables = byte_tables(centroids)
    _, units, whole = taken_apart(tables.bytes, size)
    rest = centroids.double() - tables.middles.double()[:, :, None]
    lost = rest / units.where(units > 0, 1.0)[..., None] - whole
    expected = torch.stack([numbers.norm(dim=-1).amax(-1) for numbers in (whole, lost, rest)], -1)
    assert (tables.limits >= expected).all()
    torch.testing.assert_close(tables.limits.double(), expected, rtol=1e-5, atol=0)
