"""`h2o-N`: a cache of N tokens per KV head, half recent, half heavy hitters; all others are dropped (H2O, section 4).

Heavy hitters are the tokens with the most attention so far, summed over the queries that saw them and, with grouped
queries, over the heads of the group (algorithm 1). The attention that is summed is that of the shrunken cache, so the
cache of every query is found by going through the window token by token. Takes no other recency.
"""

import torch

from research.literature.request import LiteratureRequest, SmallCache
from vllm_antkv.offline.method import Method

NAMES = ("h2o-64", "h2o-128", "h2o-256")


class HeavyHitters(SmallCache):
    """A cache of `size` tokens per KV head, of which the last half stays whatever its score."""

    def visible(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        """See `Eviction.visible`; a query sees the cache as its predecessor left it, and its own token."""
        num_windows, num_tokens, num_kv_heads, _ = key.shape
        grouped = query.unflatten(2, (num_kv_heads, -1))
        held = key.new_zeros((num_windows, num_kv_heads, num_tokens), dtype=torch.bool)
        score = key.new_zeros((num_windows, num_kv_heads, num_tokens))
        steps = []
        for token in range(num_tokens):
            held[..., token] = True
            steps.append(held.clone())
            past = slice(0, token + 1)
            logits = torch.einsum("whgd,wthd->whgt", grouped[:, token], key[:, past]) * scale
            weights = logits.masked_fill(~held[..., None, past], -torch.inf).softmax(-1)
            score[..., past] += weights.sum(2)
            if token >= self.size:
                # The recent half, with the token in hand, cannot be dropped.
                old = slice(0, token + 1 - self.size // 2)
                weakest = score[..., old].masked_fill(~held[..., old], torch.inf).argmin(-1, keepdim=True)
                held.scatter_(-1, weakest, False)
        return torch.stack(steps, dim=2)


def build(name: str, request: LiteratureRequest) -> Method:
    """Of the size that the name says."""
    return request.evicting(name, HeavyHitters)
