"""Weighted k-means: weights count, starts are reproducible, no centroid is wasted."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans

from vllm_antkv.offline import kmeans
from vllm_antkv.offline.kmeans import cluster_sums, cuml_kmeans, improved, learn_centroids
from vllm_antkv.ops import cpu, cpu_clusters


def gaussian(num_points: int, size: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_points, size))


def learned(points: np.ndarray, num_centroids: int, weights: np.ndarray | None = None, seed: int = 0) -> np.ndarray:
    """Centroids of one problem, (num_centroids, size)."""
    given = np.ones(len(points)) if weights is None else weights
    return learn_centroids(
        torch.from_numpy(points).float()[None], torch.from_numpy(given).float()[None], num_centroids, seed
    )[0].numpy()


def distances_of(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    return cdist(points, centroids, "sqeuclidean")


def objective(points: np.ndarray, weights: np.ndarray, centroids: np.ndarray) -> float:
    return float((weights * distances_of(points, centroids).min(1)).sum())


def test_a_heavy_token_gets_a_centroid_of_its_own():
    points = gaussian(2000)
    weights = np.ones(len(points))
    weights[17] = 1e6
    assert distances_of(points[17:18], learned(points, 16, weights)).min() < 1e-4


def test_equals_one_replicated_point_per_weight():
    """Integer weights mean the same as repeating points, at the optimum of well-parted clusters."""
    centres = gaussian(4, 2) * 100
    points = np.repeat(centres, 50, axis=0) + gaussian(200, 2)
    weights = np.random.default_rng(2).integers(1, 4, len(points))
    weighted = learned(points, 4, weights)
    repeated = learned(np.repeat(points, weights, axis=0), 4)
    order = [np.lexsort(found.T) for found in (weighted, repeated)]
    np.testing.assert_allclose(weighted[order[0]], repeated[order[1]], rtol=1e-3)


@pytest.mark.parametrize(("num_centroids", "cost"), [(256, 1.04), (1024, 1.08)])
def test_the_error_is_nearly_that_of_lloyds_iterations_to_the_end(num_centroids, cost):
    points = gaussian(16_384)
    weights = np.random.default_rng(1).lognormal(0, 1, len(points))
    found = learned(points, num_centroids, weights)
    best = found.astype(np.float64)
    for _ in range(20):
        labels = distances_of(points, best).argmin(1)
        totals = np.bincount(labels, weights, num_centroids)
        sums = [np.bincount(labels, weights * channel, num_centroids) for channel in points.T]
        best = np.where(totals[:, None] > 0, np.stack(sums, 1) / np.maximum(totals, 1e-30)[:, None], best)
    assert objective(points, weights, found) < cost * objective(points, weights, best)


def test_same_seed_same_bytes_whatever_the_number_of_threads():
    points = torch.from_numpy(gaussian(20_000, 8)).float().reshape(20_000, 2, 4).transpose(0, 1)
    weights = torch.ones(2, 20_000)
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            runs.append(learn_centroids(points, weights, 64, 0))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[1], runs[2])
    assert not torch.equal(runs[0], learn_centroids(points, weights, 64, 1))


def test_problems_of_a_batch_know_nothing_of_each_other():
    points = torch.from_numpy(gaussian(2000, 8)).float().reshape(2000, 2, 4).transpose(0, 1)
    weights = torch.ones(2, 2000)
    other = torch.stack((points[0], 100 * points[1]))
    assert torch.equal(learn_centroids(points, weights, 16, 0)[0], learn_centroids(other, weights, 16, 0)[0])


def test_an_empty_cluster_moves_to_the_point_that_is_served_worst():
    rows = torch.tensor([[[0.0, 1.0], [1.0, 1.0], [10.0, 1.0]]])
    far_off = torch.tensor([[[5.25], [1000.0]]])
    moved = improved(rows, torch.tensor([[1.0, 1.0, 2.0]]), far_off)
    np.testing.assert_allclose(moved[0], [[21 / 4], [10.0]])


@pytest.mark.parametrize("device", ["the kernels", "any device"])
@pytest.mark.parametrize(("num_points", "num_centroids", "size"), [(1003, 40, 4), (64, 256, 8), (9, 4, 32)])
def test_points_are_added_to_the_nearest_centroid(device, num_points, num_centroids, size):
    generator = torch.Generator().manual_seed(0)
    all_rows = torch.randn(2, num_points + 5, size + 1, generator=generator)
    all_rows[..., -1] = 1
    weights = torch.rand(2, num_points + 5, generator=generator)[:, :num_points]
    rows, centroids = all_rows[:, :num_points], torch.randn(2, num_centroids, size, generator=generator)
    if device == "any device":
        sums, distances = cluster_sums(rows, weights, centroids)
    else:
        if (variant := cpu.best()) is None:
            pytest.skip(cpu.missing() or "")
        sums, distances = cpu_clusters.cluster_sums(rows, weights, centroids, variant)
    for problem, points in enumerate(rows[..., :-1].double().numpy()):
        squares = distances_of(points, centroids[problem].numpy())
        members = np.eye(num_centroids)[squares.argmin(1)]
        weighted = rows[problem].double().numpy() * weights[problem].double().numpy()[:, None]
        np.testing.assert_allclose(sums[problem], members.T @ weighted, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(2 * distances[problem] + np.square(points).sum(1), squares.min(1), atol=1e-4)


def test_weights_of_any_range_give_finite_centroids():
    weights = 10.0 ** np.random.default_rng(0).uniform(-37, 3, 600)
    assert np.isfinite(learned(gaussian(600), 256, weights)).all()


def test_fewer_distinct_points_than_centroids_are_all_met():
    """The keys of the first layer are functions of the token alone: a small vocabulary gives few distinct ones."""
    points = np.repeat(gaussian(10), 100, axis=0)
    centroids = learned(points, 64)
    assert centroids.shape == (64, 4)
    assert np.isfinite(centroids).all()
    assert distances_of(points, centroids).min(1).max() < 1e-6


def test_cuml_learns_large_tables_on_a_gpu(monkeypatch):
    gpu, cpu_device = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setitem(sys.modules, "cuml", None)
    assert cuml_kmeans(gpu, 4096) is None, "it is not installed"
    cuml = ModuleType("cuml")
    cuml.__spec__ = ModuleSpec("cuml", None)
    cluster = ModuleType("cuml.cluster")
    cluster.KMeans = KMeans
    monkeypatch.setitem(sys.modules, "cuml", cuml)
    monkeypatch.setitem(sys.modules, "cuml.cluster", cluster)
    assert cuml_kmeans(gpu, 4096) is KMeans
    assert cuml_kmeans(gpu, 256) is None
    assert cuml_kmeans(cpu_device, 4096) is None


def test_what_cuml_is_asked_scikit_learn_answers_as_well_as_we_do(monkeypatch):
    """The same call: class, arguments, attributes. No GPU is needed for it."""
    points = gaussian(4000, 8) + 5
    weights = np.random.default_rng(1).lognormal(0, 2, len(points))
    ours = objective(points, weights, learned(points, 64, weights))
    monkeypatch.setattr(kmeans, "cuml_kmeans", lambda device, num_centroids: KMeans)
    theirs = learned(points, 64, weights)
    assert theirs.shape == (64, 8)
    assert theirs.dtype == np.float32
    assert objective(points, weights, theirs) < 1.02 * ours
    assert objective(points, weights, theirs) < objective(points, weights, learned(points, 64))
