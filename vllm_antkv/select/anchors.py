"""Which rows of a closed VQ block become anchors, from the Anchor Scores they collected."""

import torch

from vllm_antkv.ops.reference import top_rows

#: Score of an attention sink: ahead of every anchor (KVSink rows are pinned first).
SINK_SCORE = torch.inf
#: Votes that every row of a block is credited with, so that the few votes for its last rows weigh less.
VOTE_PRIOR = 32


def block_anchors(
    scores: torch.Tensor,
    exact_rows: torch.Tensor,
    coded_rows: torch.Tensor,
    num_rows: int,
    already_exact: torch.Tensor,
    anchors: bool,
    scope: str,
) -> torch.Tensor:
    """Choose the rows of one block that stay in full precision for the queries past its end.

    Equation 5 sums what a unit error of a row would cost. Here the sum is multiplied by the error its code really
    makes, and in scope `block`, where early rows of a block have had more queries than late ones, divided by their
    number; `docs/design.md` has the measurements. Tokens of the intact prefix are exact anyway and take no row.

    Args:
        scores: (..., num_kv_heads, block_size) sums over queries, SINK_SCORE for sinks.
        exact_rows, coded_rows: (..., block_size, num_kv_heads, head_size), the rows and what their codes stand for.
        num_rows: rows to keep.
        already_exact: (..., 1, block_size) bool, tokens of the intact prefix.
        anchors: False keeps only sinks.
        scope: `block` or `prompt`, as in the settings.

    Returns:
        (..., num_kv_heads, num_rows) int64 offsets in the block, -1 for an unused row.
    """
    is_sink = scores == SINK_SCORE
    if anchors:
        error = (exact_rows - coded_rows).norm(dim=-1).transpose(-1, -2)
        weighted = scores * error
        if scope == "block":
            block_size = scores.shape[-1]
            weighted = weighted / (torch.arange(block_size, 0, -1, device=scores.device) + VOTE_PRIOR)
    else:
        weighted = torch.full_like(scores, -torch.inf)
    ranked = weighted.masked_fill(is_sink, SINK_SCORE).masked_fill(already_exact, -torch.inf)
    return top_rows(ranked, num_rows)
