"""The paper's Anchor Score of every row of a window (AnTKV, equation 5)."""

import torch

from research.figures.activations import LayerRows
from research.figures.row_error import RowScores
from vllm_antkv.ops.reference import anchor_votes, causal_lse


def equation_5(rows: LayerRows) -> RowScores:
    """Votes of all queries of the window, summed."""
    votes = rows.visible
    scores = []
    for head in range(rows.key.shape[1]):
        query, key, rules = rows.group(head)
        lse = causal_lse(query, key, votes[None], rules)
        scores.append(torch.cat([(vote * votes).sum((1, 2)) for vote in anchor_votes(query, key, lse, rules)]))
    of_key, of_value = torch.stack(scores, dim=1)
    return RowScores(of_key, of_value)
