"""Tables of 4,096 centroids as they are served: rounded to FP8 (e4m3), on every device.

On a GPU such tables are read from the L2 cache, and their bytes are what decoding takes its time for. What is rounded
once, before anything is encoded, is the same for every kernel, and for the evaluator.
"""

import torch

#: Centroids per sub-vector from which tables are rounded.
ROUNDED_FROM = 4096
#: Largest e4m3 number.
FP8_MAX = 448.0
#: Sums of values are kept in units of the scale, beside exact rows in float16, whose weights are as large as 2^8.
_SMALLEST_SCALE = 2.0**-7


def served(centroids: torch.Tensor) -> torch.Tensor:
    """Centroids as kernels and the evaluator take them; again the same, if they are rounded already.

    Args:
        centroids: (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size).
    """
    if centroids.shape[2] < ROUNDED_FROM:
        return centroids
    scales = head_scales(centroids)[:, None, None, None]
    return (in_e4m3(centroids, scales).float() * scales).to(centroids.dtype)


def in_e4m3(centroids: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Centroids over scales that have its dimensions, float8_e4m3fn."""
    return (centroids.float() / scales).to(torch.float8_e4m3fn)


def head_scales(centroids: torch.Tensor) -> torch.Tensor:
    """(num_kv_heads) float32: one for all sub-vectors of a head."""
    return scales_for(centroids.float().abs().amax((1, 2, 3))).clamp(min=_SMALLEST_SCALE)


def scales_for(largest: torch.Tensor) -> torch.Tensor:
    """Powers of two, for tables with these largest magnitudes. e4m3 has an exponent of its own: finer scales would gain
    nothing.
    """
    return torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-6) / FP8_MAX)))
