"""Tables of 4,096 centroids are served in FP8 (e4m3): what is rounded once stays as it is, whoever rounds again."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_antkv.offline.vector_quantiser import _nearest
from vllm_antkv.ops.fp8_tables import head_scales, in_e4m3, served

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
