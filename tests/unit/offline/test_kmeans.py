"""Weighted k-means: weights count, starts are reproducible, no centroid is wasted."""

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from vllm_antkv.offline import kmeans
from vllm_antkv.offline.kmeans import Backend, Problem, centroids_of, learn_centroids, pick_backend, solve

CPU = pick_backend(torch.device("cpu"))


def problem(points: np.ndarray, num_centroids: int, weights: np.ndarray | None = None, seed: int = 0) -> Problem:
    ones = np.ones(len(points), np.float32)
    return Problem(
        points.astype(np.float32),
        ones if weights is None else weights.astype(np.float32),
        num_centroids,
        np.random.SeedSequence(seed),
    )


def gaussian(num_points: int, size: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_points, size))


def distances(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    return np.square(points[:, None] - centroids[None]).sum(-1)


def objective(of: Problem, centroids: np.ndarray) -> float:
    return float((of.weights * distances(of.points, centroids).min(1)).sum())


def test_a_heavy_token_gets_a_centroid_of_its_own() -> None:
    points = gaussian(2000)
    weights = np.ones(len(points))
    weights[17] = 1e6
    centroids = learn_centroids(problem(points, 16, weights), CPU)
    assert distances(points[17:18], centroids).min() < 1e-4


def test_tokens_of_little_weight_matter_little() -> None:
    points = gaussian(1000)
    far = gaussian(1000) + 100
    weights = np.concatenate((np.ones(1000), np.full(1000, 1e-9)))
    centroids = learn_centroids(problem(np.concatenate((points, far)), 8, weights), CPU)
    assert np.abs(centroids).max() < 10


def test_weights_lower_the_weighted_error() -> None:
    points = gaussian(4000, 8)
    weights = np.random.default_rng(1).lognormal(0, 2, len(points))
    weighted = problem(points, 32, weights)
    plain = problem(points, 32)
    assert objective(weighted, learn_centroids(weighted, CPU)) < objective(weighted, learn_centroids(plain, CPU))


def test_equals_one_replicated_point_per_weight() -> None:
    """Integer weights mean the same as repeating points, at the optimum of well-parted clusters."""
    centres = gaussian(4, 2) * 100
    points = np.repeat(centres, 50, axis=0) + gaussian(200, 2)
    weights = np.random.default_rng(2).integers(1, 4, len(points))
    weighted = learn_centroids(problem(points, 4, weights), CPU)
    repeated = learn_centroids(problem(np.repeat(points, weights, axis=0), 4), CPU)
    order = [np.lexsort(found.T) for found in (weighted, repeated)]
    np.testing.assert_allclose(weighted[order[0]], repeated[order[1]], rtol=1e-3)


def test_same_seed_same_bytes_whatever_the_number_of_threads() -> None:
    points = gaussian(20_000, 8)
    problems = [problem(points[:, part : part + 4], 64, seed=part) for part in (0, 2, 4)]
    runs = [
        b"".join(
            found.tobytes() for found in solve([lambda p=p: p for p in problems], Backend("cpu", CPU.lloyd, workers))
        )
        for workers in (1, 2, 2)
    ]
    assert runs[0] == runs[1] == runs[2]
    assert (
        learn_centroids(problem(points, 64, seed=1), CPU).tobytes()
        != learn_centroids(problem(points, 64, seed=2), CPU).tobytes()
    )


def test_no_centroid_is_left_without_points() -> None:
    """A start far off, as a bad draw would give it, is repaired."""
    points = gaussian(3000)
    start = np.concatenate((points[:4], np.full((4, 4), 50.0))).astype(np.float32)
    assert len(np.unique(CPU.lloyd(problem(points, 8), start))) == 8


def test_an_empty_cluster_moves_to_the_point_that_is_served_worst() -> None:
    of = problem(np.array([[0.0], [1.0], [10.0]]), 2, np.array([1.0, 1.0, 2.0]))
    centroids = centroids_of(of, np.array([0, 0, 0]))
    np.testing.assert_allclose(centroids, [[21 / 4], [10.0]])


def test_weights_of_any_range_give_finite_centroids() -> None:
    """In float32, what is left of a cluster without its heavy point is rounding error."""
    points = gaussian(600)
    weights = 10.0 ** np.random.default_rng(0).uniform(-38, 3, len(points))
    assert np.isfinite(learn_centroids(problem(points, 256, weights), CPU)).all()


def test_fewer_distinct_points_than_centroids_are_all_met() -> None:
    """The keys of the first layer are functions of the token alone: a small vocabulary gives few distinct ones."""
    points = np.repeat(gaussian(10), 100, axis=0)
    centroids = learn_centroids(problem(points, 64), CPU)
    assert centroids.shape == (64, 4)
    assert np.isfinite(centroids).all()
    assert distances(points, centroids).min(1).max() < 1e-6


def test_constant_points_are_met() -> None:
    centroids = learn_centroids(problem(np.full((300, 4), 2.5), 16), CPU)
    np.testing.assert_allclose(centroids, 2.5)


class FakeCuml:
    """Behaves as cuML does where it matters here: Lloyd on weighted points, empty clusters left where they are."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def fit(self, points: np.ndarray, sample_weight: np.ndarray) -> "FakeCuml":
        centroids = self.settings["init"].copy()
        for _ in range(self.settings["max_iter"]):
            self.labels_ = distances(points, centroids).argmin(1)
            for index in set(self.labels_):
                own = self.labels_ == index
                centroids[index] = np.average(points[own], axis=0, weights=sample_weight[own])
        return self


def test_cuml_is_used_on_a_gpu_and_its_empty_clusters_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("cuml")
    cluster = types.ModuleType("cuml.cluster")
    cluster.KMeans = FakeCuml  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuml", module)
    monkeypatch.setitem(sys.modules, "cuml.cluster", cluster)
    monkeypatch.setattr(kmeans.importlib.util, "find_spec", lambda name: module)
    backend = pick_backend(torch.device("cuda"))
    assert backend.name == "cuml"
    points = gaussian(500)
    monkeypatch.setattr(
        kmeans, "_start", lambda of, rng: np.concatenate((points[:6], np.full((2, 4), 50.0))).astype(np.float32)
    )
    centroids = learn_centroids(problem(points, 8), backend)
    assert len(np.unique(distances(points, centroids).argmin(1))) == 8


def test_without_cuml_scikit_learn_serves_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmeans.importlib.util, "find_spec", lambda name: None)
    assert pick_backend(torch.device("cuda")).name == "scikit-learn"
