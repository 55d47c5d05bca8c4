"""Training of centroids: a model that reads its past from codes is to predict what it predicts from the past itself.

K-means makes the errors of rows small, each on its own. What they do together, over heads and layers, is seen at the
end alone: the divergence of the next tokens' probabilities, which goes down its gradient here, by Adam. Which centroid
is a row's nearest is chosen anew in every step; the rows' own gradients pass the choice as if nothing had been rounded
(Egiazarian et al., "Extreme compression of large language models via additive quantization", arXiv 2401.06118, section
3.4, does likewise with codes of weights).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from vllm_antkv.codebook import Codebook
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.divergences import served_method
from vllm_antkv.offline.hidden import logits_of

#: Tokens of a step's window: two say more than one of twice the length, and take less time.
STEP_TOKENS = 1024
#: Of a step, in spreads of a channel; of the logarithm of a head's correction.
_LEARNING_RATE = 0.02
_LEARNING_RATE_OF_SIZES = 0.012
#: A centroid is met in few of the steps.
_BETAS = (0.9, 0.98)
_WARM_UP_STEPS = 10


@dataclass(frozen=True)
class _Trained:
    """What is trained of a codebook, in float32.

    tables: those of `Codebook`, K's and V's, in units of `spreads`.
    spreads: standard deviations over a table's centroids, (num_kv_heads, num_sub_vectors, 1, sub_vector_size) each. A
        channel of K can have a bias of a hundred times its spread: steps that suit another would throw it about.
    sizes: (num_layers, num_kv_heads, 1), logarithms of what `k_errors` are multiplied by.
    """

    book: Codebook
    tables: tuple[torch.Tensor, ...]
    spreads: tuple[torch.Tensor, ...]
    sizes: torch.Tensor

    @classmethod
    def of(cls, book: Codebook, device: torch.device) -> Self:
        """Where training begins."""
        tables = [table.to(device).float() for table in (*book.k, *book.v)]
        # A channel that never varies keeps its value.
        spreads = tuple(table.std(-2, keepdim=True).clamp_min(1e-6) for table in tables)
        identity = book.header.model
        sizes = torch.zeros(identity.num_layers, identity.num_kv_heads, 1, device=device)
        return cls(book, tuple(map(_leaf, map(torch.div, tables, spreads))), spreads, _leaf(sizes))

    @property
    def groups(self) -> list[dict[str, object]]:
        """For an optimizer."""
        return [{"params": self.tables, "lr": _LEARNING_RATE}, {"params": [self.sizes], "lr": _LEARNING_RATE_OF_SIZES}]

    def codebook(self) -> Codebook:
        """As trained so far; gradients reach what is trained."""
        errors = self.book.k_errors
        sized = None if errors is None else errors.to(self.sizes.device) * self.sizes.exp()
        tables = tuple(map(torch.mul, self.tables, self.spreads))
        num_layers = len(self.book.k)
        return replace(self.book, k=tables[:num_layers], v=tables[num_layers:], k_errors=sized)


def train(
    model: PreTrainedModel, book: Codebook, windows: torch.Tensor, num_steps: int, advance: Callable[[], object]
) -> Codebook:
    """The codebook with its centroids trained; the correction of its logits is resized, head by head.

    Args:
        model: frozen, in evaluation mode.
        book: to begin from.
        windows: (num_windows, seq_len) int64, one for each step, and again from the first if there are fewer.
        num_steps: of training.
        advance: called after every step.
    """
    trained = _Trained.of(book, model.device)
    optimizer = torch.optim.Adam(trained.groups, betas=_BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, num_steps))
    for step in range(num_steps):
        optimizer.zero_grad()
        _pass_back(model, trained.codebook(), windows[step % len(windows)].to(model.device))
        optimizer.step()
        schedule.step()
        advance()
    return _as_stored(trained.codebook(), book)


def _leaf(table: torch.Tensor) -> torch.Tensor:
    return table.clone().requires_grad_()


def _share(step: int, num_steps: int) -> float:
    """Of the learning rate: a steep beginning, and half a cosine down to a twentieth."""
    return min(1, (step + 1) / _WARM_UP_STEPS) * (0.525 + 0.475 * math.cos(math.pi * step / num_steps))


def _pass_back(model: PreTrainedModel, book: Codebook, window: torch.Tensor) -> None:
    """Gradients of the divergence from the model's own predictions, in nats, mean over the tokens of a window."""
    with torch.no_grad():
        own = logits_of(model, window).float().log_softmax(-1)
    with torch.enable_grad(), quantised_past(model, served_method(book), len(window)):
        found = logits_of(model, window).float().log_softmax(-1)
        # Layers that are recomputed attend through codes, too.
        functional.kl_div(found, own, reduction="batchmean", log_target=True).backward()


def _as_stored(trained: Codebook, before: Codebook) -> Codebook:
    """On the CPU, in the dtypes of another one."""
    k, v = (
        tuple(table.detach().to(old) for table, old in zip(tables, olds, strict=True))
        for tables, olds in ((trained.k, before.k), (trained.v, before.v))
    )
    errors = None if trained.k_errors is None else trained.k_errors.detach().cpu()
    return replace(trained, k=k, v=v, k_errors=errors)
