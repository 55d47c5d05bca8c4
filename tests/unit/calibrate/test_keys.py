"""What is learned of the channels of keys: their errors, and by how much they are scaled."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_antkv.calibrate.key_scales import key_scales, query_energy
from vllm_antkv.calibrate.layers import Clustering, key_errors
from vllm_antkv.ops.rope import RotaryTable, rotate
from vllm_antkv.presets import get_preset


def test_errors_are_mean_squares_over_kept_tokens_and_over_pairs_of_channels():
    random = np.random.default_rng(0)
    rows = random.standard_normal((2, 2, 20, 2, 8)).astype(np.float16)
    centroids = random.standard_normal((2, 2, 2, 5, 4)).astype(np.float16)
    kept = random.random((2, 20)) < 0.7
    order = [2, 0, 6, 4, 1, 3, 5, 7]  # channels 0 and 2, 1 and 3 turn together
    rotary = RotaryTable(torch.ones(1, 2), torch.zeros(1, 2))
    how = Clustering(get_preset("antkv-4bit"), order, None, weighted=True, seed=0, device=torch.device("cpu"))
    found = key_errors(SimpleNamespace(rows=lambda layer: rows), 0, kept, centroids, how, rotary)
    for head in range(2):
        squares = np.zeros(8)
        for row in rows[0, kept, head].astype(float):
            for sub_vector in range(2):
                channels = order[4 * sub_vector : 4 * sub_vector + 4]
                errors = (row[channels] - centroids[0, head, sub_vector]) ** 2
                squares[channels] += errors[errors.sum(1).argmin()]
        squares /= kept.sum()
        expected = [squares[[0, 2]].mean(), squares[[1, 3]].mean()] * 2 + squares[4:].tolist()
        np.testing.assert_allclose(found[head], expected, rtol=1e-4)


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
