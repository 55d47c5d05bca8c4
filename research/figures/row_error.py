"""What the code of one row alone does to attention: what AnTKV's figure 1 shows and the Anchor Score estimates.

Exact and in closed form, so that all rows of a window are measured at once. Let o_i be the output of query i and A_ij
its attention to row j. If row j alone comes back from the cache,

    from V:  o_i' - o_i = A_ij (v_j' - v_j)
    from K:  o_i' - o_i = s_ij (v_j - o_i),  s_ij = A_ij (e^d - 1) / (1 + A_ij (e^d - 1)),  d the change of the logit

The error of the row is the sum of the norms of these changes over the queries that see its code.
"""

from dataclasses import dataclass, replace

import torch

from research.figures.activations import LayerRows


@dataclass(frozen=True)
class RowScores:
    """One number for every K row and every V row of a layer, each (num_kv_heads, num_tokens) float32."""

    key: torch.Tensor
    value: torch.Tensor


def row_errors(rows: LayerRows, coded_key: torch.Tensor, coded_value: torch.Tensor, seen: torch.Tensor) -> RowScores:
    """The sum over queries of the norm of the change of the output, for each row alone.

    Args:
        rows: the layer.
        coded_key, coded_value: (num_tokens, num_kv_heads, head_size), what the rows come back as, keys after RoPE.
        seen: (num_tokens, num_tokens) bool, True where query i sees row j through its code.
    """
    of_key, of_value = [], []
    for head in range(rows.key.shape[1]):
        key, value = rows.key[:, head], rows.value[:, head]
        value_error = coded_value[:, head] - value
        error_of_key = key.new_zeros(len(key))
        mass = key.new_zeros(len(key))
        for query_head in rows.heads_of(head):
            # In float64, and without products of matrices: next to a sink, o_i is almost v_j.
            exact = replace(query_head, query=query_head.query.double(), key=key.double())
            output = exact.attention @ value.double()
            change = exact.logits(coded_key[:, head].double()) - exact.logits(exact.key)
            distance = torch.cdist(output, value.double(), compute_mode="donot_use_mm_for_euclid_dist")
            error_of_key += (_share(exact.attention, change) * distance * seen).sum(0).to(key.dtype)
            mass += (exact.attention * seen).sum(0).to(key.dtype)
        of_key.append(error_of_key)
        of_value.append(mass * value_error.norm(dim=-1))
    return RowScores(torch.stack(of_key), torch.stack(of_value))


def _share(weights: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """The magnitude of s_ij, without overflow; 0 where row j has all the attention of a query, or none."""
    others, shrunk = 1 - weights, torch.exp(-change.abs())
    total = torch.where(change > 0, others * shrunk + weights, others + weights * shrunk)
    return torch.where((weights > 0) & (others > 0), weights * (1 - shrunk) / total, 0)
