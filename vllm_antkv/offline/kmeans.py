"""Weighted k-means of many problems at once (AnTKV, section 4.2).

Minimises sum_j w_j ||x_j - c(x_j)||^2 over the centroids c of each problem. All problems of a batch take every step
together, on a CPU and on a GPU. On a CPU the result depends on the seed alone, not on the number of threads.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_antkv.ops import cpu, cpu_clusters

#: Lloyd's iterations as (share of the points, iterations), up to 256 centroids and above: most of the way is found on
#: few points. Against 20 iterations on all points of a SmolLM2 layer, the error is 0.9% higher on them and 0.3% higher
#: on held-out text, in 45% of the time.
_FEW_CENTROIDS = ((1 / 4, 8), (1, 6))
_MANY_CENTROIDS = ((1 / 4, 3), (1, 2))
#: Points per centroid among which k-means++ looks for a start: its cost grows with points times centroids. Measured
#: against 4 points drawn uniformly and weighted: 0 to 5% less error; a start without k-means++ costs 2 to 23% more.
SEEDING_POINTS = 4
#: Points per centroid that are clustered at most: 65,536 for 256 centroids, from where more change little.
MAX_POINTS = 256
#: Distances that are computed at a time: enough to fill a GPU.
_DISTANCES = 1 << 26
#: Centroids from which cuML learns a table at a time. So many fill a GPU; thousands of small problems do together.
_LARGE = 4096
_ITERATIONS_OF_LARGE = 20


def learn_centroids(
    points: torch.Tensor, weights: torch.Tensor, num_centroids: int, seed: int, further: int = 0
) -> torch.Tensor:
    """Weighted k-means from a k-means++ start.

    Args:
        points: (num_problems, num_points, size) float32.
        weights: (num_problems, num_points) float32, positive.
        num_centroids: of each problem, at most num_points.
        seed: sets the random choices.
        further: iterations on all points at the end, beside those that calibration takes; not of cuML's.

    Returns:
        (num_problems, num_centroids, size) float32. With fewer distinct points than centroids, some are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    # In random order, so that the first points are a sample of all.
    chosen = torch.randperm(points.shape[1], generator=generator)[: MAX_POINTS * num_centroids].to(points.device)
    points, weights = points[:, chosen], weights[:, chosen]
    # Scores lose fewer digits around zero.
    centre = points.mean(1, keepdim=True)
    rows = torch.cat((points - centre, torch.ones_like(points[..., :1])), -1)
    centroids = _start(rows[..., :-1], weights, num_centroids, generator)
    if (kmeans := cuml_kmeans(rows.device, num_centroids)) is not None:
        return learn_one_by_one(kmeans, rows[..., :-1], weights, centroids) + centre
    variant = cpu.best() if rows.device.type == "cpu" else None
    least = min(rows.shape[1], SEEDING_POINTS * num_centroids)
    schedule = _FEW_CENTROIDS if num_centroids <= 256 else _MANY_CENTROIDS
    for share, iterations in (*schedule, (1, further)):
        num_points = max(least, math.ceil(share * rows.shape[1]))
        for _ in range(iterations):
            centroids = improved(rows[:, :num_points], weights[:, :num_points], centroids, variant)
    return centroids + centre


def _start(points: torch.Tensor, weights: torch.Tensor, num_centroids: int, generator: torch.Generator) -> torch.Tensor:
    """k-means++ on points drawn by weight without replacement, which then count alike."""
    device = points.device
    num_points = min(points.shape[1], SEEDING_POINTS * num_centroids)
    # The largest of log(weight) + Gumbel noise are such a draw.
    noise = torch.empty(weights.shape).exponential_(generator=generator).log().to(device)
    drawn = (weights.log() - noise).topk(num_points, dim=1).indices
    points = points.gather(1, drawn[..., None].expand(-1, -1, points.shape[2]))
    # Channel by channel, a centroid's products with all points take a tenth of the time.
    squares, channels = points.square().sum(-1), points.mT.contiguous()
    thresholds = torch.rand(num_centroids, len(points), 1, generator=generator, dtype=torch.float64).to(device)
    distances = torch.ones_like(squares)
    centroids: list[torch.Tensor] = []
    for threshold in thresholds:
        reached = distances.double().cumsum(1)
        index = torch.searchsorted(reached, threshold * reached[:, -1:], right=True).clamp(max=num_points - 1)
        centroid = points.gather(1, index[..., None].expand(-1, -1, points.shape[2]))
        own = squares - 2 * (centroid @ channels)[:, 0] + centroid.square().sum(-1)
        distances = own.clamp(min=0) if not centroids else torch.minimum(distances, own.clamp(min=0))
        centroids.append(centroid)
    return torch.cat(centroids, dim=1)


def improved(
    rows: torch.Tensor, weights: torch.Tensor, centroids: torch.Tensor, variant: cpu.Variant | None = None
) -> torch.Tensor:
    """The weighted mean of each cluster; an empty one is reseeded with a point that adds most to the objective.

    Args:
        rows: (num_problems, num_points, size + 1) float32, points followed by a 1.
        weights: (num_problems, num_points) float32.
        centroids: (num_problems, num_centroids, size) float32.
        variant: of the C++ kernels; None: PyTorch.
    """
    size = centroids.shape[2]
    if variant is None:
        sums, distances = cluster_sums(rows, weights, centroids)
    else:
        sums, distances = cpu_clusters.cluster_sums(rows, weights, centroids, variant)
    means, totals = sums.split((size, 1), dim=-1)
    empty = totals[..., 0] == 0
    means = (means / totals.masked_fill(empty[..., None], 1)).float()
    if not empty.any():
        return means
    points = rows[..., :-1]
    errors = weights * (points.square().sum(-1) + 2 * distances)
    worst = errors.topk(min(int(empty.sum(1).max()), errors.shape[1]), dim=1).indices
    reseeded = worst.gather(1, (empty.cumsum(1) - 1).clamp(min=0, max=worst.shape[1] - 1))
    return torch.where(empty[..., None], points.gather(1, reseeded[..., None].expand(-1, -1, size)), means)


def cluster_sums(
    rows: torch.Tensor, weights: torch.Tensor, centroids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cpu_clusters.cluster_sums`, on any device."""
    num_problems, num_centroids, size = centroids.shape
    table = torch.cat((-centroids, centroids.square().sum(-1, keepdim=True) / 2), -1).mT
    # In float64: a heavy point must not drown the others.
    sums = torch.zeros(num_problems * num_centroids, size + 1, dtype=torch.float64, device=rows.device)
    first_label = num_centroids * torch.arange(num_problems, device=rows.device)[:, None]
    nearest = torch.empty_like(weights)
    step = max(1, _DISTANCES // (num_problems * num_centroids))
    for start in range(0, rows.shape[1], step):
        piece, own = rows[:, start : start + step], weights[:, start : start + step]
        nearest[:, start : start + step], labels = (piece @ table).min(-1)
        sums.index_add_(0, (labels + first_label).flatten(), (piece.double() * own[..., None]).flatten(0, 1))
    return sums.view(num_problems, num_centroids, -1), nearest


def cuml_kmeans(device: torch.device, num_centroids: int) -> Callable[..., Any] | None:
    """KMeans of cuML, where that is installed, on a GPU and for large tables; else None."""
    if device.type != "cuda" or num_centroids < _LARGE or importlib.util.find_spec("cuml") is None:
        return None
    from cuml.cluster import KMeans

    return KMeans  # type: ignore[no-any-return]


def learn_one_by_one(
    kmeans: Callable[..., Any], points: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor
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
        estimator = kmeans(n_clusters=len(start), init=start.cpu().numpy(), n_init=1, max_iter=_ITERATIONS_OF_LARGE)
        estimator.fit(own.cpu().numpy(), sample_weight=weight.cpu().numpy())
        learned.append(np.asarray(estimator.cluster_centers_, np.float32))
    return torch.from_numpy(np.stack(learned)).to(points.device)
