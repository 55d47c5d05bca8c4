import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_antkv.calibrate.key_scales import key_scales, query_energy
from vllm_antkv.ops.rope import RotaryTable, rotate


def test_rope_does_not_change_the_energy_of_queries():
    angles = torch.rand(50, 3, generator=torch.Generator().manual_seed(0)) * 6
    query = torch.randn(50, 4, 8, generator=torch.Generator().manual_seed(1))
    for neox in (True, False):
        rotary = RotaryTable(angles.cos(), angles.sin(), is_neox_style=neox)
        before, after = (query_energy(rows, 2, rotary) for rows in (query, rotate(query, torch.arange(50), rotary)))
        torch.testing.assert_close(before, after)
        pairs = [(0, 3), (1, 4), (2, 5)] if neox else [(0, 1), (2, 3), (4, 5)]
        for a, b in pairs:
            assert torch.equal(before[:, a], before[:, b])
            torch.testing.assert_close(before[:, a], query[..., [a, b]].square().sum(-1).mean(0).view(2, 2).mean(1))


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=2, max_size=8))
def test_scales_are_powers_of_two_that_grow_with_the_energy(energies):
    scales = key_scales(torch.tensor([energies]))[0]
    mantissas, exponents = scales.frexp()
    assert (mantissas == 0.5).all()
    assert (exponents.abs() <= 5).all()
    assert torch.equal(scales[torch.tensor(energies).argsort()], scales.sort().values)


def test_a_head_that_no_query_reads_is_not_scaled():
    assert torch.equal(key_scales(torch.zeros(2, 4)), torch.ones(2, 4))
