"""How an attention layer makes logits of its products, and which of them take part in a softmax."""

from dataclasses import dataclass

import torch

from vllm_antkv.select.recency import visible


@dataclass(frozen=True, eq=False)
class LogitRules:
    """Of one layer; attention and the votes for anchors follow the same.

    scale: multiplies products of queries and keys; that is a logit.
    window: tokens that a query sees, itself included: at position p those from p - window + 1 on. None: all before it.
    soft_cap: a logit becomes soft_cap * tanh(logit / soft_cap), before anything is masked. None: it stays.
    sinks: (num_heads,) float32, a learned logit of every query head that takes part in each softmax, with a value of
        zeros; None: there is none.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def are_plain(self) -> bool:
        """Logits are scaled products, and every query sees all tokens before it."""
        return self.window is None and self.soft_cap is None and self.sinks is None

    def logits(self, products: torch.Tensor, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
        """Of products of queries and keys, any shape; `bias` is added to the scaled ones (`reference.jensen_bias`).

        A soft cap f takes b in: f(x + b), about f + f' b, stands for log E exp f(x + e), about f + (f'^2 + f'') b. They
        differ by f' b (t^2 + 2 t / soft_cap) with t = tanh(x / soft_cap): nothing where logits are far from the cap,
        and where they are near, f' is small.
        """
        scaled = products * self.scale + bias
        return scaled if self.soft_cap is None else self.soft_cap * torch.tanh(scaled / self.soft_cap)

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which keys queries see, bool; positions, whose shapes broadcast."""
        return visible(queries, keys, self.window)

    def lse(self, logits: torch.Tensor) -> torch.Tensor:
        """Of logits (S, num_heads, num_queries, T), -inf where masked, and the sinks: (S, num_heads, num_queries)."""
        lse = logits.logsumexp(-1)
        return lse if self.sinks is None else torch.logaddexp(lse, self.sinks.to(lse)[:, None])

    def first_visible(self, query: int) -> int:
        """Position of the first token that the query at this position sees."""
        return 0 if self.window is None else max(query - self.window + 1, 0)
