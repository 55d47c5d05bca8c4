"""Weighted k-means: one interface over cuML on a GPU and scikit-learn on a CPU (AnTKV, section 4.2).

Minimises sum_j w_j ||x_j - c(x_j)||^2 over the centroids c. The result depends on the seed alone, not on the number of
threads: every problem runs on one thread, and problems run side by side.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

#: Lloyd iterations.
ITERATIONS = 20
#: Points per centroid among which k-means++ looks for a start. Its cost grows with points times centroids.
SEEDING_POINTS = 8


@dataclass(frozen=True)
class Problem:
    """One weighted k-means problem.

    points: (num_points, size) float32.
    weights: (num_points,) float32, not negative.
    num_centroids: at most num_points.
    seed: sets the start.
    """

    points: np.ndarray
    weights: np.ndarray
    num_centroids: int
    seed: np.random.SeedSequence


#: Improves centroids: (problem, start) -> centroids; both (num_centroids, size) float32.
Lloyd = Callable[[Problem, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Backend:
    """What runs Lloyd's iterations, and how many problems at a time."""

    name: str
    lloyd: Lloyd
    workers: int


def pick_backend(device: torch.device) -> Backend:
    """Use cuML where the device is a GPU and cuML is installed, otherwise scikit-learn on the CPU's threads."""
    if device.type == "cuda" and importlib.util.find_spec("cuml") is not None:
        return Backend("cuml", _cuml_lloyd, 1)
    return Backend("scikit-learn", _sklearn_lloyd, torch.get_num_threads())


def solve(problems: Sequence[Callable[[], Problem]], backend: Backend) -> Iterator[np.ndarray]:
    """Centroids of each problem, in order. Problems are built only when their turn comes.

    Yields:
        (num_centroids, size) float32.
    """
    # OpenMP's limit belongs to each thread, BLAS's to the process.
    with (
        threadpool_limits(1),
        ThreadPoolExecutor(backend.workers, initializer=partial(threadpool_limits, 1)) as pool,
    ):
        yield from pool.map(lambda build: learn_centroids(build(), backend), problems)


def learn_centroids(problem: Problem, backend: Backend) -> np.ndarray:
    """Weighted k-means from a k-means++ start.

    Returns:
        (num_centroids, size) float32. With fewer distinct points than centroids, some centroids are equal.
    """
    return backend.lloyd(problem, _start(problem))


def _start(problem: Problem) -> np.ndarray:
    """k-means++ on a subsample."""
    rng = np.random.default_rng(problem.seed)
    num_points = min(len(problem.points), SEEDING_POINTS * problem.num_centroids)
    chosen = rng.choice(len(problem.points), num_points, replace=False)
    start, _ = kmeans_plusplus(
        problem.points[chosen],
        problem.num_centroids,
        sample_weight=problem.weights[chosen],
        random_state=int(rng.integers(2**31)),
        n_local_trials=1,
    )
    return start


def _sklearn_lloyd(problem: Problem, start: np.ndarray) -> np.ndarray:
    """scikit-learn moves a centroid without points to the point that is worst served."""
    kmeans = KMeans(problem.num_centroids, init=start, n_init=1, max_iter=ITERATIONS, algorithm="lloyd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than centroids
        return kmeans.fit(problem.points, sample_weight=problem.weights).cluster_centers_


def _cuml_lloyd(problem: Problem, start: np.ndarray) -> np.ndarray:
    """Lloyd on a GPU. cuML leaves an empty cluster where it is, so those are moved here and all are improved again."""
    from cuml.cluster import KMeans as CumlKMeans

    def fit(init: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kmeans = CumlKMeans(
            n_clusters=problem.num_centroids, init=init, n_init=1, max_iter=ITERATIONS, output_type="numpy"
        )
        kmeans.fit(problem.points, sample_weight=problem.weights)
        return kmeans.cluster_centers_, kmeans.labels_

    centroids, labels = fit(start)
    empty = np.flatnonzero(np.bincount(labels, minlength=problem.num_centroids) == 0)
    if not len(empty):
        return centroids
    return fit(reseed(problem, centroids, labels, empty))[0]


def reseed(problem: Problem, centroids: np.ndarray, labels: np.ndarray, empty: np.ndarray) -> np.ndarray:
    """Centroids with those in `empty` moved onto the points that add most to the objective.

    Args:
        centroids: (num_centroids, size) float32.
        labels: (num_points,) integer, each point's centroid.
        empty: (num_empty,) integer.
    """
    errors = problem.weights * np.square(problem.points - centroids[labels]).sum(-1)
    worst = np.argsort(-errors, kind="stable")[: len(empty)]
    moved = centroids.copy()
    moved[empty[: len(worst)]] = problem.points[worst]
    return moved
