"""Centroids as kernels hold them: in whole numbers of 16 bits, in bytes, and in FP8 (e4m3).

None of the first overflows; of bytes it is said how near they are; what FP8 rounds once stays as it is, whoever rounds
again.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_rope import make_table
from vllm_antkv.offline.vector_quantiser import _nearest
from vllm_antkv.ops.byte_tables import LANES, byte_tables
from vllm_antkv.ops.fixed_point import RUN, fixed_tables
from vllm_antkv.ops.fp8_tables import head_scales, in_e4m3, served

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


TABLE = (2, 2, 4096, 16)


def table(seed: int, size: float = 1.0) -> torch.Tensor:
    """(num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) float16."""
    return (torch.randn(TABLE, generator=torch.Generator().manual_seed(seed)) * size).half()


@settings(max_examples=10)
@given(seed=st.integers(0, 99), size=st.sampled_from([1e-3, 0.05, 1.0, 37.0, 2000.0]))
def test_rounding_again_changes_nothing(seed, size):
    once = served(table(seed, size))
    assert torch.equal(served(once), once)
    # Nor does it for some of the heads, which may have a smaller scale together.
    assert torch.equal(served(once[:1]), once[:1])


@settings(max_examples=10)
@given(seed=st.integers(0, 99), size=st.sampled_from([0.05, 1.0, 37.0, 2000.0]))
def test_numbers_keep_four_bits(seed, size):
    original = table(seed, size)
    change = (served(original).float() - original.float()).abs()
    # Half a step of e4m3, or of its smallest numbers.
    smallest = head_scales(original)[:, None, None, None] * 2.0**-10
    assert (change <= torch.maximum(original.float().abs() / 16, smallest)).all()


def test_kernels_get_the_same_numbers_in_eight_bits():
    rounded = served(table(0, 3.0))
    scales = head_scales(rounded)[:, None, None, None]
    assert torch.equal((in_e4m3(rounded, scales).float() * scales).half(), rounded)


def test_smaller_tables_stay_as_they_are():
    small = table(0)[:, :, :256]
    assert served(small) is small


def test_gradients_reach_centroids_past_the_rounding():
    centroids = table(0).float().requires_grad_()
    rows = torch.randn(1, 3, 2, 32)
    decoded = _nearest(rows, centroids)
    with torch.no_grad():
        assert torch.equal(decoded, _nearest(rows, served(centroids)))
    decoded.sum().backward()
    assert centroids.grad.sum() == decoded.numel()
