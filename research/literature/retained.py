"""Attention as the literature's baselines have it: K and V rows exact or coded each by a table, or dropped.

The engine's own attention, with anchors that are found on the way, is in `vllm_antkv.offline.attention`.
"""

from typing import TYPE_CHECKING

import torch

from vllm_antkv.offline.method import LayerWindow

if TYPE_CHECKING:
    from research.literature.method import LiteratureMethod

#: Queries taken at a time, which bounds the matrix of logits.
_QUERIES = 128


def attend_retained(window: LayerWindow, method: "LiteratureMethod", sink_until: torch.Tensor | None) -> torch.Tensor:
    """Attention of one layer over whole windows.

    Args:
        window: rows in full precision.
        method: with a retention and a quantiser, or with an eviction.
        sink_until: (num_windows, num_tokens) int64, the last query for which each token is a sink; None where no sinks
            are known.

    Returns:
        (num_windows, num_tokens, num_heads, head_size).
    """
    query, key, value, rules = window.query, window.key, window.value, window.rules
    num_tokens, groups = key.shape[1], query.shape[2] // key.shape[2]
    positions = torch.arange(num_tokens, device=key.device)
    if method.eviction is not None:
        visible = method.eviction.visible(query, key, rules.scale)
        key_until = value_until = torch.full_like(positions, num_tokens)[None]
        seen_key, seen_value = key, value
    else:
        assert method.quantiser is not None
        assert method.retention is not None
        visible = rules.visible(positions[:, None], positions)[None, None]
        tables = (table.to(key.device)[None] for table in method.retention.tables(num_tokens))
        key_until, value_until = (t if sink_until is None else torch.maximum(t, sink_until) for t in tables)
        seen_key, seen_value = method.quantiser.read_back(window.owner.layer, key, value, window.rotary)
    key, seen_key, value, seen_value = (
        rows.repeat_interleave(groups, dim=2) for rows in (key, seen_key, value, seen_value)
    )
    visible = visible.repeat_interleave(groups, dim=1) if visible.shape[1] > 1 else visible
    outputs = []
    for queries in positions.split(_QUERIES):
        block, past = slice(int(queries[0]), int(queries[-1]) + 1), slice(0, int(queries[-1]) + 1)
        exact_key, exact_value = (until[:, None, None, past] >= queries[:, None] for until in (key_until, value_until))
        exact, coded = (torch.einsum("wqhd,wthd->whqt", query[:, block], rows[:, past]) for rows in (key, seen_key))
        logits = rules.logits(torch.where(exact_key, exact, coded)).masked_fill(~visible[..., block, past], -torch.inf)
        weights = torch.exp(logits - rules.lse(logits)[..., None])
        outputs.append(
            torch.einsum("whqt,wthd->wqhd", weights * exact_value, value[:, past])
            + torch.einsum("whqt,wthd->wqhd", weights * ~exact_value, seen_value[:, past])
        )
    return torch.cat(outputs, dim=1)
