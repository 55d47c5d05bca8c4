"""Which rows of a closed VQ block become anchors, from their accumulated Anchor Scores."""

import torch

from vllm_antkv.ops.reference import top_rows

#: Score of an attention sink: ahead of every anchor (KVSink rows are pinned first).
SINK_SCORE = torch.inf


def block_anchors(scores: torch.Tensor, num_rows: int, already_exact: torch.Tensor, anchors: bool) -> torch.Tensor:
    """Choose the rows of one block that stay in full precision for the queries past its end.

    Scores are sums over the queries of the block (equation 5 as written). Tokens of the intact prefix are exact
    anyway and do not take a row.

    Args:
        scores: (..., block_size), SINK_SCORE for sinks.
        num_rows: rows to keep.
        already_exact: (..., block_size) bool, tokens of the intact prefix.
        anchors: False keeps only sinks.

    Returns:
        (..., num_rows) int64 offsets in the block, -1 for an unused row.
    """
    eligible = scores if anchors else scores.masked_fill(scores != SINK_SCORE, -torch.inf)
    return top_rows(eligible.masked_fill(already_exact, -torch.inf), num_rows)
