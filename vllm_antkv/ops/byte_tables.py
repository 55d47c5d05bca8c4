"""4,096 centroids in bytes, by which the C++ kernels rule out nearly all that are not the nearest.

How they are compared is in csrc/cpu/nearest_bytes.h.
"""

from typing import NamedTuple

import torch

#: Centroids of a block, whose numbers of the same four channels lie side by side.
LANES = 16
#: The largest whole number; bytes are 128 more.
LARGEST = 127


class ByteTables(NamedTuple):
    """Of a layer's K or V.

    bytes: (num_kv_heads, num_sub_vectors, num_centroids / 16, 128 + 16 sub_vector_size) uint8. A block of 16 centroids
        has half their squared norms, the units of their whole numbers, both float32, and those numbers plus 128,
        (sub_vector_size / 4, 16, 4). All are of centroids less the middle.
    middles: (num_kv_heads, num_sub_vectors, sub_vector_size) float32.
    limits: (num_kv_heads, num_sub_vectors, 3) float32. The largest norm, over centroids, of whole numbers, of what
        rounding to them took, and of the centroid.
    """

    bytes: torch.Tensor
    middles: torch.Tensor
    limits: torch.Tensor


def byte_tables(centroids: torch.Tensor) -> ByteTables:
    """Tables for `antkv_layer`.

    Args:
        centroids: (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size).
    """
    num_kv_heads, num_sub_vectors, num_centroids, size = centroids.shape
    # A median, as one centroid far from all others is not to move it.
    middles = centroids.float().median(2).values
    rest = centroids.double() - middles.double()[:, :, None]
    units = (rest.abs().amax(-1) / LARGEST).float()
    exact = rest / torch.where(units > 0, units, 1.0)[..., None]
    whole = exact.round().clamp(-LARGEST, LARGEST)
    blocks = num_kv_heads, num_sub_vectors, num_centroids // LANES
    parts = [
        (rest.square().sum(-1) / 2).float().view(*blocks, LANES).view(torch.uint8),
        units.view(*blocks, LANES).view(torch.uint8),
        (whole + 128).byte().view(*blocks, LANES, size // 4, 4).transpose(3, 4).flatten(3),
    ]
    limits = [numbers.norm(dim=-1).amax(-1) for numbers in (whole, exact - whole, rest)]
    return ByteTables(torch.cat(parts, -1), middles, torch.stack(limits, -1).float() * (1 + 2**-20))
