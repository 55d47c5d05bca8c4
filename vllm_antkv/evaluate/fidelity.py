"""How far the predictions of one served cache are from those of another, from the most likely tokens of each.

vLLM gives the log-probabilities of the few most likely tokens. Tokens that are not in both lists are taken together as
one outcome, so the divergence is a lower bound of that over the whole vocabulary, and close to it where the lists hold
most of the probability.
"""

from dataclasses import dataclass

import torch
from pydantic import BaseModel

#: Of each position; the most that vLLM gives by default.
TOP_TOKENS = 20
#: Least probability of the tokens outside the lists: rounding may leave less than nothing.
_LEAST_REST = 1e-9


@dataclass(frozen=True)
class TopTokens:
    """The most likely tokens of some positions, the most likely first.

    ids: (num_positions, TOP_TOKENS) int64.
    logprobs: (num_positions, TOP_TOKENS) float64, natural logarithms.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor

    @classmethod
    def of(cls, steps: list[dict[int, float]]) -> "TopTokens":
        """From token -> log-probability for each position; what is beyond the first TOP_TOKENS is left out."""
        best = [sorted(step.items(), key=lambda item: -item[1])[:TOP_TOKENS] for step in steps]
        return cls(
            torch.tensor([[token for token, _ in step] for step in best]),
            torch.tensor([[logprob for _, logprob in step] for step in best], dtype=torch.float64),
        )

    @classmethod
    def cat(cls, parts: "list[TopTokens]") -> "TopTokens":
        """All positions, one part after the other."""
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.logprobs for part in parts]))


class Fidelity(BaseModel, frozen=True):
    """Part of the JSON of `antkv eval served --against`.

    kv_cache_dtype: what is compared with.
    perplexity: of that on the same windows.
    top1_agreement: share of positions whose most likely token is the same.
    kl: mean Kullback-Leibler divergence from `kv_cache_dtype` to what was evaluated, in nats, over top_tokens.
    top_tokens: tokens of each position that are told apart.
    """

    kv_cache_dtype: str
    perplexity: float
    top1_agreement: float
    kl: float
    top_tokens: int = TOP_TOKENS


def top1_agreement(reference: TopTokens, other: TopTokens) -> float:
    """Share of positions with the same most likely token."""
    return (reference.ids[:, 0] == other.ids[:, 0]).double().mean().item()


def divergence(reference: TopTokens, other: TopTokens) -> torch.Tensor:
    """KL(reference || other) of every position in nats, (num_positions,) float64, over common tokens and a rest."""
    same = reference.ids[:, :, None] == other.ids[:, None, :]
    common = same.any(-1)
    logprobs_of_other = torch.where(same, other.logprobs[:, None, :], 0.0).sum(-1)
    p, q = (torch.where(common, logprobs.exp(), 0.0) for logprobs in (reference.logprobs, logprobs_of_other))
    listed = torch.where(common, p * (reference.logprobs - logprobs_of_other), 0.0).sum(-1)
    rest_p, rest_q = ((1 - share.sum(-1)).clamp_min(_LEAST_REST) for share in (p, q))
    return (listed + rest_p * (rest_p / rest_q).log()).clamp_min(0.0)
