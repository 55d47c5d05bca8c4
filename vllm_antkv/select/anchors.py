"""Which rows of a closed VQ block become anchors, from the Anchor Scores they collected."""

import torch

from vllm_antkv.config import AntKVConfig
from vllm_antkv.select.recency import visible

#: Added to the offset of an anchor whose row is kept as it is, in two anchor rows; the offset of the other is -1.
EXACT_ANCHOR = 128
#: Score of an attention sink: ahead of every anchor (KVSink rows are pinned first).
SINK_SCORE = torch.inf
#: Votes that every row of a block is credited with, so that the few votes for its last rows weigh less.
VOTE_PRIOR = 32
#: Votes and errors are raised to it. With the queries of the whole prompt squares are better, as errors of many rows
#: add up in an output like independent ones; with those of a block alone they gain nothing. The scope `prompt` is
#: offline evaluation's alone.
VOTE_POWER = {"block": 1, "prompt": 2}
#: What a query's vote counts on a row that it sees exactly anyway, where others vote that see the code: enough to
#: decide between rows that have no other votes.
RECENT_VOTE = 1 / 1024


def vote_weights(
    queries: torch.Tensor, keys: torch.Tensor, last_query: torch.Tensor, scope: str, window: int | None = None
) -> torch.Tensor:
    """What each query's vote on each key counts.

    Args:
        queries: (num_queries, 1) int64 positions.
        keys: (num_keys,) int64 positions.
        last_query: (max_model_len,) int32, what is seen exactly (`select.recency`).
        scope: `block` or `prompt`. In a block, all see all rows exactly, or none but their own.
        window: of the layer, see `select.recency.visible`.

    Returns:
        (num_queries, num_keys) float32, 0 where the query does not see the key.
    """
    votes = visible(queries, keys, window).float()
    if scope == "block":
        return votes
    return votes * torch.where(queries <= last_query[keys], RECENT_VOTE, 1.0)


def code_errors(exact_rows: torch.Tensor, coded_rows: torch.Tensor) -> torch.Tensor:
    """Norms of what codes lose: (..., block_size, num_kv_heads, head_size) each -> (..., num_kv_heads, block_size)."""
    return (exact_rows - coded_rows).norm(dim=-1).transpose(-1, -2)


def block_anchors(
    scores: torch.Tensor,
    errors: torch.Tensor,
    already_exact: torch.Tensor,
    config: AntKVConfig,
    window: int | None = None,
    scope: str = "block",
) -> torch.Tensor:
    """Choose the rows of one block of which queries past its end see more than the codes.

    Scores say what a unit error of a row would cost. Here they are multiplied by the error its code really makes (in
    scope `prompt` squared, as the votes are), and in scope `block`, where early rows of a block have had more queries
    than late ones, divided by their number; `docs/design.md` has the measurements. Tokens of the intact prefix take no
    row. Those that are kept as they are take two, and come first: with `anchor_dtype: model` all anchors; otherwise
    sinks, as many as leave one for every other sink.

    Args:
        scores: (..., num_kv_heads, block_size) sums over queries, SINK_SCORE for sinks.
        errors: (..., num_kv_heads, block_size), see `code_errors`.
        already_exact: (..., 1, block_size) bool, tokens of the intact prefix.
        config: how many rows there are, and what they keep.
        window: of the layer: no row has more votes than that.
        scope: whose votes the scores are, as in `VOTE_POWER`.

    Returns:
        (..., num_kv_heads, anchor_rows) int64 offsets in the block, -1 for an unused row; see `EXACT_ANCHOR`.
    """
    is_sink = scores == SINK_SCORE
    if config.anchor_share > 0:
        weighted = scores * errors ** VOTE_POWER[scope]
        if scope == "block":
            block_size = scores.shape[-1]
            num_votes = torch.arange(block_size, 0, -1, device=scores.device).clamp(max=window or block_size)
            weighted = weighted / (num_votes + VOTE_PRIOR)
    else:
        weighted = torch.full_like(scores, -torch.inf)
    ranked = weighted.masked_fill(is_sink, SINK_SCORE).masked_fill(already_exact, -torch.inf)
    num_rows = config.anchor_rows
    if config.anchor_dtype == "model":
        num_exact = (ranked > -torch.inf).sum(-1, keepdim=True).clamp(max=num_rows // 2)
    else:
        num_sinks = (ranked == SINK_SCORE).sum(-1, keepdim=True)
        num_exact = torch.minimum(num_sinks, num_rows - num_sinks).clamp(min=0)
    return _share_rows(ranked, num_exact, num_rows)


def _share_rows(ranked: torch.Tensor, num_exact: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`num_rows` rows for the highest `ranked`: two each for the first `num_exact` (..., 1), then one each."""
    row = torch.arange(num_rows, device=ranked.device)
    is_exact = row < 2 * num_exact
    rank = torch.where(is_exact, row // 2, row - num_exact)
    offsets = top_rows(ranked, num_rows)
    offsets = offsets.gather(-1, rank.clamp(max=offsets.shape[-1] - 1))
    return torch.where(is_exact, torch.where(row % 2 == 0, offsets + EXACT_ANCHOR, -1), offsets)


def top_rows(scores: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Offsets of the highest scores, highest first; equal scores take the lower offset.

    Args:
        scores: (..., block_size); -inf marks a row that cannot be chosen.

    Returns:
        (..., num_rows) int64, -1 where fewer rows can be chosen.
    """
    num_rows = min(num_rows, scores.shape[-1])
    values, offsets = scores.sort(dim=-1, descending=True, stable=True)
    return offsets[..., :num_rows].masked_fill(values[..., :num_rows] == -torch.inf, -1)
