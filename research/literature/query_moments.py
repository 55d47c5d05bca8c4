"""How much of each channel of K its queries see, before RoPE: what an error there does to logits (TaSQ).

The logit of a query at t and a key at p is q_t . R_p k: an error e of the key before RoPE moves it by (R_p^T q_t) . e.
Here is the mean square of each channel of R_p^T q_t over all t that see p.
"""

import torch

from vllm_antkv.ops.rope import RotaryTable


def channel_pairs(table: RotaryTable, head_size: int) -> list[list[int]]:
    """The channels that RoPE turns together, and neighbours among the others."""
    half = table.rotary_dim // 2
    if table.is_neox_style:
        turning = [[first, first + half] for first in range(half)]
    else:
        turning = [[2 * first, 2 * first + 1] for first in range(half)]
    return turning + [[first, first + 1] for first in range(table.rotary_dim, head_size, 2)]


def query_moments(query: torch.Tensor, num_kv_heads: int, table: RotaryTable, window: int | None) -> torch.Tensor:
    """The mean squares, over all pairs of a token and a query that sees it.

    A pair of channels is a complex number z, and R_p^T multiplies it by a conjugate r: the squares of the two parts of
    r z are half of |r z|^2 more and less the real part of (r z)^2. So sums over queries need |z|^2 and z^2 alone.

    Args:
        query: (num_tokens, num_heads, head_size), after RoPE.
        table: what turns queries and keys.
        window: tokens that a query sees, itself included; None: all before it.

    Returns:
        (num_kv_heads, head_size) float32.
    """
    num_tokens, _, head_size = query.shape
    first, second = torch.tensor(channel_pairs(table, head_size), device=query.device).T
    by_head = query.double().unflatten(1, (num_kv_heads, -1))
    pairs = torch.complex(by_head[..., first], by_head[..., second])
    turns = torch.ones(num_tokens, 1, head_size // 2, dtype=pairs.dtype, device=query.device)
    turns[:, 0, : table.rotary_dim // 2] = torch.complex(table.cos, table.sin)[:num_tokens].conj()

    tokens = torch.arange(num_tokens, device=query.device)
    end = (tokens + (window or num_tokens)).clamp(max=num_tokens)

    def over_queries(values: torch.Tensor) -> torch.Tensor:
        """Of the query heads of a KV head the mean, of the queries that see each token the sum."""
        sums = torch.nn.functional.pad(values.mean(2).cumsum(0), (0, 0, 0, 0, 1, 0))
        return sums[end] - sums[tokens]

    squares = over_queries(pairs.abs().square()) * turns.abs().square()
    turned = (over_queries(pairs.square()) * turns.square()).real
    moments = torch.empty(num_kv_heads, head_size, dtype=torch.float64, device=query.device)
    moments[:, first], moments[:, second] = (squares + turned).sum(0) / 2, (squares - turned).sum(0) / 2
    return (moments / (end - tokens).sum()).float()
