"""Centroids of K and angles as whole numbers of 16 bits, which processors multiply twice as fast as float32.

What the C++ kernels do with them is in csrc/cpu/fixed_logits.h.
"""

import torch

from vllm_antkv.ops.rope import RotaryTable, pair_sums

#: What the largest centroid of a channel becomes. Turned, and rounded on the way, keys stay within 16 bits.
LARGEST = 32_000
#: What cosines and sines are multiplied with; a product of 16 bits divides by one more.
ONE = 32_767
#: Tokens of a run: keys are rotated by their offsets in it.
RUN = 64
#: A channel's largest centroid may be so many times the usual ones: their last bit is then 1/500 of them.
MOST_UNEVEN = 64.0


def fixed_tables(k_centroids: torch.Tensor, rotary: RotaryTable | None) -> dict[str, torch.Tensor] | None:
    """Tables for `antkv_layer`, or None where a few centroids are so large that 16 bits would not do for the others.

    Args:
        k_centroids: (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size), channels in the order of codes.
        rotary: for rows in that order; None for a layer without RoPE.

    Returns:
        k_fixed: as `k_centroids`, int16. k_units: (num_kv_heads, head_size) float32, what 1 stands for, with the
        magnitude of the angles. fixed_angles: (64, 2, rotary_dim / 2) int16, cosines and sines of offsets, or
        (64, 2, rotary_dim) where neighbours rotate together: those of each channel, sines of the first one negative.
    """
    num_kv_heads, num_sub_vectors, _, size = k_centroids.shape
    sizes = k_centroids.float().abs()
    largest, usual = (
        pair_sums(of_channels.reshape(num_kv_heads, -1).square(), rotary).sqrt()
        for of_channels in (sizes.amax(2), sizes.mean(2))
    )
    if not (torch.isfinite(largest).all() and (largest <= MOST_UNEVEN * usual).all()):
        return None
    units = torch.where(largest > 0, largest, 1.0) / LARGEST
    shares = k_centroids / units.view(num_kv_heads, num_sub_vectors, 1, size)
    tables = {"k_fixed": shares.round().short()}
    if rotary is not None:
        magnitude = float(rotary.cos[0, 0])
        units[:, : rotary.rotary_dim] *= magnitude * (ONE + 1) / ONE
        cos, sin = ((table[:RUN] / magnitude * ONE).round().clamp(-ONE, ONE) for table in (rotary.cos, rotary.sin))
        if not rotary.is_neox_style:
            cos, sin = cos.repeat_interleave(2, 1), torch.stack([-sin, sin], 2).flatten(1)
        # Tokens are multiplied 32 at a time, those behind the last position of a table too.
        tables["fixed_angles"] = torch.zeros(RUN, 2, cos.shape[1], dtype=torch.int16)
        tables["fixed_angles"][: len(cos)] = torch.stack([cos, sin], 1)
    return tables | {"k_units": units}
