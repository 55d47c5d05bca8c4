"""Scales of K's channels: a code is chosen by the channels that queries look at.

K is coded and kept times its scales, and queries attend divided by them. Scales are powers of two, so that logits stay
what they are to the last bit. Both channels of a rotary pair have the same, so that RoPE commutes with them. What
changes is the distance by which codes and anchors are chosen: an error e of a key moves the logit of a query q by q.e.
"""

import torch


def query_scales(k_scale: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What queries are multiplied by.

    Args:
        k_scale: (num_kv_heads, head_size), powers of two.
        num_heads: of queries.

    Returns:
        (num_heads, head_size), the inverse for each query head.
    """
    return k_scale.reciprocal().repeat_interleave(num_heads // len(k_scale), 0)
