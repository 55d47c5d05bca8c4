"""Scales of K's channels from the queries of the calibration text; what they are for: `codebook.key_scales`."""

import torch

from vllm_antkv.ops.rope import RotaryTable, pair_sums

#: Scales are the mean square of the queries to this power (`docs/research/ablations.md`).
_POWER = 0.4
#: Exponents are at most so far from 0, so that K times its scales fits float16.
_MOST = 4


def query_energy(query: torch.Tensor, num_kv_heads: int, rotary: RotaryTable) -> torch.Tensor:
    """Mean squares of the queries that read each KV head, the same before and after RoPE.

    Args:
        query: (num_tokens, num_heads, head_size).
        rotary: what turns them.

    Returns:
        (num_kv_heads, head_size) float32; both channels of a rotary pair have their sum.
    """
    squares = query.float().square().mean(0).unflatten(0, (num_kv_heads, -1)).mean(1)
    return pair_sums(squares, rotary)


def key_scales(energy: torch.Tensor) -> torch.Tensor:
    """(..., head_size) float32 powers of two from `query_energy`; 1 for a head that no query reads."""
    relative = (energy / energy.mean(-1, keepdim=True)).nan_to_num(1)
    return (_POWER * relative.log2()).round().clamp(-_MOST, _MOST).exp2()
