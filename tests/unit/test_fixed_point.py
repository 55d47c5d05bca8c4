"""Keys in whole numbers of 16 bits: none of them overflows, and they are what the centroids are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_rope import make_table
from vllm_antkv.ops.fixed_point import RUN, fixed_tables

tables = st.none() | st.builds(
    make_table,
    rotary_dim=st.sampled_from([16, 32, 64]),
    magnitude=st.sampled_from([1.0, 0.7, 1.37]),
    is_neox_style=st.booleans(),
)


def draw_centroids(seed: int, spread: float = 1.0) -> torch.Tensor:
    """For heads of 64 channels, some of which are `spread` times as large as others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 8, 256, 8, generator=generator) * spread ** torch.rand(2, 8, 1, 8, generator=generator)


def with_partners(rows: torch.Tensor, table) -> torch.Tensor:
    """(heads, 64): the length of what turns together, for each of its channels."""
    partners = torch.arange(64)
    if table is not None and table.is_neox_style:
        partners[: table.rotary_dim] = partners[: table.rotary_dim].roll(table.rotary_dim // 2)
    elif table is not None:
        partners[: table.rotary_dim] ^= 1
    return torch.where(partners == torch.arange(64), rows.abs(), torch.hypot(rows, rows[:, partners]))


@given(table=tables, seed=st.integers(0, 99), spread=st.sampled_from([1.0, 1e3]))
def test_they_are_the_centroids_and_have_room_to_turn(table, seed, spread):
    centroids = draw_centroids(seed, spread)
    made = fixed_tables(centroids, table)
    whole, units = made["k_fixed"].double(), made["k_units"].double()
    if table is not None:
        magnitude = float(table.cos[0, 0]) * 32768 / 32767
        units = units / torch.where(torch.arange(64) < table.rotary_dim, magnitude, 1.0)
    # Any row of centroids: the largest of each sub-vector's channels, together.
    assert with_partners(whole.abs().amax(2).flatten(1), table).max() <= 32_001
    # A last bit is less than what bfloat16 rounds off the usual numbers.
    usual = with_partners(centroids.double().square().mean(2).sqrt().flatten(1), table)
    assert (units <= usual / 2**8).all()
    units = units.view(2, 8, 1, 8)
    assert ((whole * units - centroids).abs() <= 0.51 * units).all()


@given(table=tables.filter(lambda table: table is not None))
def test_angles_are_those_of_a_run_without_their_magnitude(table):
    cos, sin = fixed_tables(draw_centroids(0), table)["fixed_angles"].double().unbind(1)
    if not table.is_neox_style:
        assert torch.equal(cos[:, ::2], cos[:, 1::2])
        assert torch.equal(sin[:, ::2], -sin[:, 1::2])
        cos, sin = cos[:, ::2], sin[:, 1::2]
    for ours, theirs in ((cos, table.cos), (sin, table.sin)):
        exact = theirs[:RUN].double() / float(table.cos[0, 0])
        assert (ours / 32767 - exact).abs().max() < 2**-15


def test_a_short_table_of_angles_is_filled_up():
    table = make_table()
    short = type(table)(table.cos[:10], table.sin[:10])
    ours, whole = (fixed_tables(draw_centroids(0), t)["fixed_angles"] for t in (short, table))
    assert ours.shape == whole.shape
    assert torch.equal(ours[:10], whole[:10])


@pytest.mark.parametrize("outlier", [1e4, torch.inf, torch.nan])
def test_a_centroid_far_from_all_others_leaves_no_room_for_them(outlier):
    centroids = draw_centroids(0)
    centroids[1, 2, 3, 4] = outlier
    assert fixed_tables(centroids, make_table()) is None


def test_a_channel_of_zeros():
    centroids = draw_centroids(0)
    centroids[:, 2, :, 4] = 0
    made = fixed_tables(centroids, None)
    assert (made["k_fixed"][:, 2, :, 4] == 0).all()
    assert made["k_units"].isfinite().all()
