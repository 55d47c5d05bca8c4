"""Choose the anchors of a closed VQ block from Anchor Scores.

A vote is a query's contribution to the Anchor Score of a K or V vector (a row).
"""

import torch

from vllm_antkv.config import AntKVConfig

#: Added to the offset of an unquantised anchor, which takes two anchor slots; the second slot's offset is -1.
EXACT_ANCHOR = 128
#: Score of an attention sink, which ranks it before all other tokens (KVSink).
SINK_SCORE = torch.inf
#: Added to the number of votes that scores are divided by: few queries see the last rows of a block.
VOTE_PRIOR = 32


def code_errors(exact_rows: torch.Tensor, coded_rows: torch.Tensor) -> torch.Tensor:
    """Norms of code errors: (..., block_size, num_kv_heads, head_size) each -> (..., num_kv_heads, block_size)."""
    return (exact_rows - coded_rows).norm(dim=-1).transpose(-1, -2)


def block_anchors(
    scores: torch.Tensor,
    errors: torch.Tensor,
    already_exact: torch.Tensor,
    config: AntKVConfig,
    window: int | None = None,
) -> torch.Tensor:
    """Choose the anchors of one block, which later blocks' queries see beside the codes.

    A score is the cost of a unit error. It is multiplied by the error of the code and divided by the number of queries,
    of which early rows had more; `docs/design.md` says why.

    Args:
        scores: (..., num_kv_heads, block_size) sums over queries, SINK_SCORE for sinks.
        errors: (..., num_kv_heads, block_size), see `code_errors`.
        already_exact: (..., 1, block_size) bool, tokens of the intact prefix.
        config: number of slots, and what they store.
        window: of the layer: a row has at most as many votes.

    Returns:
        as `anchor_slots`.
    """
    block_size = scores.shape[-1]
    num_votes = torch.arange(block_size, 0, -1, device=scores.device).clamp(max=window or block_size)
    return anchor_slots(scores * errors / (num_votes + VOTE_PRIOR), scores == SINK_SCORE, already_exact, config)


def anchor_slots(
    gains: torch.Tensor, is_sink: torch.Tensor, already_exact: torch.Tensor, config: AntKVConfig
) -> torch.Tensor:
    """Give the slots of one block to sinks, and then to the rows that gain most.

    Tokens of the intact prefix take no slot. Unquantised anchors take two slots and come first: all anchors with
    `anchor_dtype: model`, otherwise as many sinks as leave one slot for every other sink.

    Args:
        gains: (..., num_kv_heads, block_size); those of sinks are not looked at.
        is_sink: same shape, bool.
        already_exact: (..., 1, block_size) bool, tokens of the intact prefix.
        config: number of slots, and what they store.

    Returns:
        (..., num_kv_heads, anchor_rows) int64 offsets in the block, -1 for an unused slot; see `EXACT_ANCHOR`.
    """
    if config.anchor_share == 0:
        gains = torch.full_like(gains, -torch.inf)
    ranked = gains.masked_fill(is_sink, SINK_SCORE).masked_fill(already_exact, -torch.inf)
    num_rows = config.anchor_rows
    if config.anchor_dtype == "model":
        num_exact = (ranked > -torch.inf).sum(-1, keepdim=True).clamp(max=num_rows // 2)
    else:
        num_sinks = (ranked == SINK_SCORE).sum(-1, keepdim=True)
        num_exact = torch.minimum(num_sinks, num_rows - num_sinks).clamp(min=0)
    return _share_rows(ranked, num_exact, num_rows)


def _share_rows(ranked: torch.Tensor, num_exact: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Assign `num_rows` slots to the highest `ranked`: two each to the first `num_exact` (..., 1), then one each."""
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
