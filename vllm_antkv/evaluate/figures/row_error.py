"""What the code of one row alone does to attention: what AnTKV's figure 1 shows and the Anchor Score estimates.

Exact and in closed form, so that all rows of a window are measured at once. Let o_i be the output of query i and A_ij
its attention to row j. If row j alone comes back from the cache,

    from V:  o_i' - o_i = A_ij (v_j' - v_j)
    from K:  o_i' - o_i = s_ij (v_j - o_i),  s_ij = A_ij (e^d - 1) / (1 + A_ij (e^d - 1)),  d the change of the logit

The error of the row is the sum of the norms of these changes over the queries that see its code.
"""

from dataclasses import dataclass

import torch

from vllm_antkv.evaluate.figures.activations import LayerRows


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
            weights = query_head.attention
            output = weights @ value
            growth = torch.expm1(query_head.logits(coded_key[:, head]) - query_head.logits(key))
            share = weights * growth / (1 + weights * growth)
            error_of_key += (share.abs() * torch.cdist(output, value) * seen).sum(0)
            mass += (weights * seen).sum(0)
        of_key.append(error_of_key)
        of_value.append(mass * value_error.norm(dim=-1))
    return RowScores(torch.stack(of_key), torch.stack(of_value))
