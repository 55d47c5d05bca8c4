"""The sums of k-means by the C++ kernels for CPUs (csrc/cpu/clusters.cpp)."""

import ctypes
from typing import ClassVar

import torch
from torch.nn import functional

from vllm_antkv.ops.c_structs import HEADER, fields
from vllm_antkv.ops.cpu import Variant, loaded

#: Centroids that the widest vectors hold.
_MULTIPLE = 16


class ClustersArgument(ctypes.Structure):
    """antkv_clusters of csrc/cpu/antkv.h."""

    _fields_: ClassVar = fields(HEADER, "antkv_clusters")


def cluster_sums(
    rows: torch.Tensor, weights: torch.Tensor, centroids: torch.Tensor, variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the points of each centroid add up to; the result depends neither on threads nor on other problems.

    Args:
        rows: (num_problems, num_points, size + 1) float32, points of at most 32 channels followed by a 1; those of a
            problem lie one behind the other.
        weights: (num_problems, num_points) float32, likewise.
        centroids: (num_problems, num_centroids, size) float32.
        variant: of the kernels, one that is not `missing`.

    Returns:
        sums: (num_problems, num_centroids, size + 1) float64, of rows times weights.
        distances: (num_problems, num_points) float32, |c|^2 / 2 - c.x of the nearest centroid c to a point x.
    """
    num_problems, num_points, width = rows.shape
    spare = -centroids.shape[1] % _MULTIPLE
    columns = functional.pad(centroids.mT, (0, spare)).contiguous()
    half_norms = functional.pad(centroids.square().sum(-1) / 2, (0, spare), value=torch.inf)
    sums = torch.zeros(num_problems, half_norms.shape[1], width, dtype=torch.float64)
    distances = torch.empty(num_problems, num_points)
    assert rows.stride()[1:] == (width, 1)
    assert weights.stride(1) == 1
    argument = ClustersArgument(
        rows=rows.data_ptr(),
        weights=weights.data_ptr(),
        rows_stride=rows.stride(0),
        weights_stride=weights.stride(0),
        columns=columns.data_ptr(),
        half_norms=half_norms.data_ptr(),
        sums=sums.data_ptr(),
        distances=distances.data_ptr(),
        num_problems=num_problems,
        num_points=num_points,
        size=width - 1,
        num_centroids=half_norms.shape[1],
    )
    loaded(variant).antkv_cluster(ctypes.byref(argument))
    return sums[:, : centroids.shape[1]], distances
