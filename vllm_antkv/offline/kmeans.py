"""Weighted k-means: one interface over cuML on a GPU and scikit-learn on a CPU (AnTKV, section 4.2).

Minimises sum_j w_j ||x_j - c(x_j)||^2 over the centroids c. The result depends on the seed alone, not on the number of
threads: every problem runs on one thread, and problems run side by side.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

#: Lloyd iterations at most, up to 256 centroids and above. Measured by held-out weighted error on a small Llama's rows:
#: with 256 centroids it falls by 2 to 5% from 4 to 20 iterations, with 4,096 by 0.5% from 3 to 12, at a cost per
#: iteration that is 16 times higher.
ITERATIONS_FEW, ITERATIONS_MANY = 20, 4
#: Points per centroid among which k-means++ looks for a start: its cost grows with points times centroids, and at 4,096
#: it already exceeds Lloyd's. Measured as above against 4 points drawn uniformly and weighted: 0 to 5% less error; a
#: start without k-means++ costs 2 to 23% more.
SEEDING_POINTS = 4
#: Points per centroid that are clustered at most: 65,536 for 256 centroids, from where more change little.
MAX_POINTS = 256


@dataclass(frozen=True)
class Problem:
    """One weighted k-means problem.

    points: (num_points, size) float32.
    weights: (num_points,) float32, positive.
    num_centroids: at most num_points.
    seed: sets the random choices.
    """

    points: np.ndarray
    weights: np.ndarray
    num_centroids: int
    seed: np.random.SeedSequence


#: Runs Lloyd's iterations from a start: (problem, (num_centroids, size) float32) -> label of each point, (num_points,).
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
    rng = np.random.default_rng(problem.seed)
    problem = _thinned(problem, rng)
    labels = backend.lloyd(problem, _start(problem, rng))
    # Backends sum in float32, where taking a heavy point out of a cluster can leave nothing but rounding errors behind:
    # of their result only the labels are used.
    return centroids_of(problem, labels)


def centroids_of(problem: Problem, labels: np.ndarray) -> np.ndarray:
    """The weighted mean of each cluster; an empty one is reseeded with a point that adds most to the objective.

    Args:
        labels: (num_points,) integer.

    Returns:
        (num_centroids, size) float32.
    """
    points, weights = problem.points.astype(np.float64), problem.weights.astype(np.float64)
    totals = np.bincount(labels, weights, problem.num_centroids)
    sums = [np.bincount(labels, weights * channel, problem.num_centroids) for channel in points.T]
    empty = np.flatnonzero(totals == 0)
    totals[empty] = 1
    centroids = np.stack(sums, axis=1) / totals[:, None]
    if len(empty):
        errors = weights * np.square(points - centroids[labels]).sum(-1)
        centroids[empty] = points[np.argsort(-errors, kind="stable")[: len(empty)]]
    return centroids.astype(np.float32)


def _start(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """k-means++ on points drawn by weight, which then count alike."""
    num_points = min(len(problem.points), SEEDING_POINTS * problem.num_centroids)
    chances = problem.weights.astype(np.float64)
    chosen = rng.choice(len(problem.points), num_points, replace=False, p=chances / chances.sum())
    # Of float32 it would make float64, in pieces, for every centroid anew.
    start, _ = kmeans_plusplus(
        problem.points[chosen].astype(np.float64),
        problem.num_centroids,
        random_state=int(rng.integers(2**31)),
        n_local_trials=1,
    )
    return start.astype(np.float32)


def _thinned(problem: Problem, rng: np.random.Generator) -> Problem:
    """The problem with at most MAX_POINTS points per centroid, drawn at random."""
    num_points = MAX_POINTS * problem.num_centroids
    if len(problem.points) <= num_points:
        return problem
    chosen = rng.choice(len(problem.points), num_points, replace=False)
    return replace(problem, points=problem.points[chosen], weights=problem.weights[chosen])


def _iterations(problem: Problem) -> int:
    return ITERATIONS_FEW if problem.num_centroids <= 256 else ITERATIONS_MANY


def _sklearn_lloyd(problem: Problem, start: np.ndarray) -> np.ndarray:
    kmeans = KMeans(problem.num_centroids, init=start, n_init=1, max_iter=_iterations(problem))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than centroids
        return kmeans.fit(problem.points, sample_weight=problem.weights).labels_


def _cuml_lloyd(problem: Problem, start: np.ndarray) -> np.ndarray:
    from cuml.cluster import KMeans as CumlKMeans

    kmeans = CumlKMeans(
        n_clusters=problem.num_centroids, init=start, n_init=1, max_iter=_iterations(problem), output_type="numpy"
    )
    return kmeans.fit(problem.points, sample_weight=problem.weights).labels_
