"""Weighted k-means: one interface over cuML on a GPU and scikit-learn on a CPU (AnTKV, section 4.2).

Minimises sum_j w_j ||x_j - c(x_j)||^2 over the centroids c.
"""

import warnings
from collections.abc import Callable

import numpy as np
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.exceptions import ConvergenceWarning

#: Improves centroids: (points, weights, initial centroids, iterations) -> centroids; all float32.
Lloyd = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]


def learn_centroids(
    points: np.ndarray, weights: np.ndarray, num_centroids: int, seed: np.random.SeedSequence, lloyd: Lloyd
) -> np.ndarray:
    """Weighted k-means from a k-means++ start.

    Args:
        points: (num_points, size) float32, num_points >= num_centroids.
        weights: (num_points,) float32, not negative.

    Returns:
        (num_centroids, size) float32.
    """
    rng = np.random.default_rng(seed)
    return lloyd(points, weights, seeds(points, weights, num_centroids, rng), ITERATIONS)


def seeds(points, weights, num_centroids, rng, per=8):
    idx = rng.choice(len(points), min(len(points), per*num_centroids), replace=False)
    init, _ = kmeans_plusplus(points[idx], num_centroids, sample_weight=weights[idx], random_state=int(rng.integers(2**31)), n_local_trials=1)
    return init

ITERATIONS = 10

def sklearn_lloyd(points: np.ndarray, weights: np.ndarray, centroids: np.ndarray, iterations: int) -> np.ndarray:
    kmeans = KMeans(len(centroids), init=centroids, n_init=1, max_iter=iterations, tol=1e-4, algorithm="lloyd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return kmeans.fit(points, sample_weight=weights).cluster_centers_
