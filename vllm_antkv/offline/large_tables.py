"""k-means of one large table at a time, as cuML and scikit-learn have it.

4,096 centroids of many points fill a GPU alone. Thousands of small problems do not: `kmeans` takes these together.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

#: Centroids from which a table is large.
_LARGE = 4096
_ITERATIONS = 20

#: Makes an estimator with scikit-learn's interface.
Estimator = Callable[..., Any]


def cuml_kmeans(device: torch.device, num_centroids: int) -> Estimator | None:
    """KMeans of cuML, where that is installed, on a GPU and for large tables; else None."""
    if device.type != "cuda" or num_centroids < _LARGE or importlib.util.find_spec("cuml") is None:
        return None
    from cuml.cluster import KMeans

    found: Estimator = KMeans
    return found


def learn_one_by_one(
    kmeans: Estimator, points: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Weighted k-means of each problem.

    Args:
        kmeans: cuML's or scikit-learn's class.
        points: (num_problems, num_points, size) float32.
        weights: (num_problems, num_points) float32, positive.
        starts: (num_problems, num_centroids, size) float32.

    Returns:
        (num_problems, num_centroids, size) float32, on the device of `points`.
    """
    learned = []
    for own, weight, start in zip(points, weights, starts, strict=True):
        estimator = kmeans(n_clusters=len(start), init=start.cpu().numpy(), n_init=1, max_iter=_ITERATIONS)
        estimator.fit(own.cpu().numpy(), sample_weight=weight.cpu().numpy())
        learned.append(np.asarray(estimator.cluster_centers_, np.float32))
    return torch.from_numpy(np.stack(learned)).to(points.device)
