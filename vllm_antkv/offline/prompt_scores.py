"""Anchor Scores by all queries of a window, as AnTKV has them; calibration weighs rows by them without gradients."""

import torch

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.offline.method import LayerWindow
from vllm_antkv.ops.reference import anchor_score, causal_lse
from vllm_antkv.select.recency import visible

#: Exponent of votes and errors: errors of many rows add up in an output like independent ones, by their squares. With a
#: block's queries alone squares gain nothing.
POWER = 2
#: Weight of a vote for a row that the query sees unquantised: it only decides between rows without other votes.
RECENT_VOTE = 1 / 1024


def vote_weights(
    queries: torch.Tensor, keys: torch.Tensor, last_query: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Weight of each query's vote for each key.

    Args:
        queries: (num_queries, 1) int64 positions.
        keys: (num_keys,) int64 positions.
        last_query: (max_model_len,) int32, see `select.recency`.
        window: of the layer, see `select.recency.visible`.

    Returns:
        (num_queries, num_keys) float32, 0 where the query does not see the key.
    """
    return visible(queries, keys, window).float() * torch.where(queries <= last_query[keys], RECENT_VOTE, 1.0)


def prompt_scores(window: LayerWindow, last_query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchor Scores summed over all later queries of the window, from full-precision attention, as in the paper.

    Args:
        window: rows in full precision.
        last_query: (max_model_len,) int32, the last query that sees a position exactly (`select.recency`).

    Returns:
        scores of K and of V, each (num_windows, num_kv_heads, num_tokens).
    """
    query, key, rules = window.query, window.key, window.rules
    num_windows, num_tokens, num_kv_heads, _ = key.shape
    positions = torch.arange(num_tokens, device=key.device)
    key_score, value_score = key.new_zeros(2, num_windows, num_kv_heads, num_tokens)
    for start in range(0, num_tokens, VQ_BLOCK_SIZE):
        block = slice(start, min(start + VQ_BLOCK_SIZE, num_tokens))
        past = slice(0, block.stop)
        seen = rules.visible(positions[block, None], positions[past])[None]
        lse = causal_lse(query[:, block], key[:, past], seen, rules)
        weight = vote_weights(positions[block, None], positions[past], last_query, rules.window)
        of_key, of_value = anchor_score(query[:, block], key[:, past], lse, weight[None], rules, POWER)
        key_score[..., past] += of_key
        value_score[..., past] += of_value
    return key_score, value_score
