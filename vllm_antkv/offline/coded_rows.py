"""Rows as they come back from the cache: decoded from codes, the anchors of closed blocks corrected."""

from typing import NamedTuple

import torch

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.offline.method import LayerWindow, Quantiser
from vllm_antkv.ops.reference import anchor_score, causal_lse, corrected, correction
from vllm_antkv.select.anchors import EXACT_ANCHOR, SINK_SCORE, block_anchors, code_errors


class CodedRows(NamedTuple):
    """Rows as they come back from the cache.

    key, value: (num_windows, num_tokens, num_kv_heads, head_size).
    is_code: (num_windows, num_tokens, num_kv_heads) bool, False for anchors of K.
    """

    key: torch.Tensor
    value: torch.Tensor
    is_code: torch.Tensor


class OwnQueries:
    """The server's choice of anchors: by the queries of a block, when it closes.

    window: rows in full precision, of the layer whose K and V are attended to.
    """

    def __init__(self, window: LayerWindow, config: AntKVConfig) -> None:
        self.window, self.config = window, config

    def scores(self, block: slice, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchor Scores of a block's K and V, each (num_windows, num_kv_heads, block_size).

        visible: (1, block_size, block_size) bool, what the block's queries see of it.
        """
        query, key, rules = self.window.query[:, block], self.window.key[:, block], self.window.rules
        return anchor_score(query, key, causal_lse(query, key, visible, rules), visible.to(key.dtype), rules)

    def anchors(self, scores: torch.Tensor, errors: torch.Tensor, already_exact: torch.Tensor) -> torch.Tensor:
        """See `block_anchors`."""
        return block_anchors(scores, errors, already_exact, self.config, self.window.rules.window)


def decoded_rows(window: LayerWindow, quantiser: Quantiser) -> CodedRows:
    """Rows of blocks that are not closed, which have no anchors."""
    key, value = quantiser.read_back(window.owner.layer, window.key, window.value, window.rotary)
    return CodedRows(key, value, torch.ones(key.shape[:3], dtype=torch.bool, device=key.device))


def closed_rows(decoded: CodedRows, choice: OwnQueries, is_sink: torch.Tensor | None) -> CodedRows:
    """Rows as queries of later blocks see them.

    No gradient reaches an anchor: what is stored for it makes up for whatever its code is.
    """
    chosen, rows = _anchors(decoded, choice, is_sink)
    key, value = (
        torch.where(is_anchor[..., None], anchor, coded)
        for is_anchor, anchor, coded in zip(chosen, rows, decoded[:2], strict=True)
    )
    return CodedRows(key, value, ~chosen[0])


@torch.no_grad()
def _anchors(
    decoded: CodedRows, choice: OwnQueries, is_sink: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those of all blocks that close before the last token: no query sees others.

    Returns:
        of K and of V: which rows they are, as `is_code`, and all rows, corrected where they are.
    """
    owner, config = choice.window, choice.config
    num_tokens = owner.key.shape[1]
    positions = torch.arange(num_tokens, device=owner.key.device)
    rows = [of_kind.detach().clone() for of_kind in decoded[:2]]
    chosen = [torch.zeros_like(decoded.is_code) for _ in rows]
    for start in range(0, num_tokens - VQ_BLOCK_SIZE if config.anchor_rows else 0, VQ_BLOCK_SIZE):
        block = slice(start, start + VQ_BLOCK_SIZE)
        visible = owner.rules.visible(positions[block, None], positions[block])[None]
        scores = choice.scores(block, visible)
        for kind, full in enumerate((owner.key, owner.value)):
            score, seen = scores[kind], rows[kind][:, block]
            if is_sink is not None:
                score = score.masked_fill(is_sink[:, None, block], SINK_SCORE)
            offsets = choice.anchors(score, code_errors(full[:, block], seen), positions[block] < config.prefix)
            chosen[kind][:, block] = _correct_anchors(seen, full[:, block], offsets)
    return chosen, rows


def _correct_anchors(seen: torch.Tensor, full: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Correct the decoded rows of the anchors of one block as the cache would.

    Args:
        seen: (num_windows, block_size, num_kv_heads, head_size) decoded rows, written.
        full: the same rows in full precision.
        rows: (num_windows, num_kv_heads, anchor_rows) offsets of the anchors, from `block_anchors`.

    Returns:
        (num_windows, block_size, num_kv_heads) bool, which rows are anchors.
    """
    offsets = torch.arange(seen.shape[1], device=seen.device)
    # An unused row is -1 and matches no offset.
    in_fp8, exact = (
        (rows[..., None] == first + offsets).any(-2).transpose(1, 2)[..., None] for first in (0, EXACT_ANCHOR)
    )
    seen.copy_(torch.where(exact, full, torch.where(in_fp8, corrected(seen, correction(full, seen)), seen)))
    return (exact | in_fp8)[..., 0]
