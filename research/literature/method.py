"""What a method of the literature is: rows exact or coded each by a table, or dropped."""

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel

from research.literature.retained import attend_retained
from research.literature.retention import Retention
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.offline.method import Attention, LayerWindow, Method, Quantiser
from vllm_antkv.offline.traits import layer_traits
from vllm_antkv.select.recency import ALWAYS

#: Of a full-precision element in a paper's cache, whatever the checkpoint is stored in.
FULL_BITS = 16.0


class CountedQuantiser(Quantiser, Protocol):
    """A quantiser that says what it stores."""

    def element_bits(self, identity: ModelIdentity, num_tokens: int) -> tuple[float, float]:
        """Bits stored per K element and per V element of the tokens that are quantised.

        Counts codes, scales, zero points and outliers, and tables that are learned anew for each sequence, spread over
        its `num_tokens` tokens. Tables learned from a calibration text are per model and not counted.
        """
        ...


class Eviction(Protocol):
    """Keeps rows exactly or not at all."""

    def visible(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        """Which rows each query still finds.

        Args:
            query: (num_windows, num_tokens, num_heads, head_size), after RoPE.
            key: (num_windows, num_tokens, num_kv_heads, head_size), after RoPE.
            scale: multiplies the logits.

        Returns:
            (num_windows or 1, num_kv_heads or 1, num_tokens, num_tokens) bool, [..., i, j] for query i and row j <= i.
        """
        ...

    def kept(self, num_tokens: int) -> int:
        """Tokens held, per KV head, once `num_tokens` have been seen."""
        ...


def _attend(window: LayerWindow, method: Method, sink_until: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(method, LiteratureMethod)
    return attend_retained(window, method, sink_until)


@dataclass(frozen=True)
class LiteratureMethod(Method):
    """One way of keeping a KV cache that the engine does not have.

    retention: rows that stay exact, instead of what `config` says.
    num_sinks: how many sinks are kept: the strongest so far by `sinks`, whatever its threshold.
    eviction: rows are dropped instead of quantised.
    """

    retention: Retention | None = None
    num_sinks: int = 0
    eviction: Eviction | None = None
    attention: Attention | None = _attend

    @property
    def settings(self) -> dict[str, Any]:
        """See `Method.settings`."""
        return self.provenance or {}

    def sinks_among(self, magnitude: torch.Tensor) -> torch.Tensor:
        """(num_windows, num_tokens) int64, the last query for which each token is a sink."""
        return strongest_so_far(magnitude.amax(-1), self.num_sinks)

    def stored_bits(self, identity: ModelIdentity, num_tokens: int, num_seen: int) -> float:
        """As its paper stores it: rows that the next query will see exactly at 16 bits, all others as codes."""
        if self.eviction is not None:
            return FULL_BITS * self.eviction.kept(num_tokens) / num_tokens
        assert self.retention is not None
        coded = cast(CountedQuantiser, self.quantiser).element_bits(identity, num_seen)
        total = 0.0
        for until, bits in zip(self.retention.tables(num_tokens), coded, strict=True):
            exact = float((until[-num_seen:] >= num_tokens).sum())
            if self.sinks is not None:
                layers = sum(index > self.sinks.layer for index in identity.decoder_indices)
                exact += min(self.num_sinks, num_seen - exact) * layers / identity.num_layers
            total += exact * FULL_BITS + (num_seen - exact) * bits
        return total / (2 * num_seen)


def check_eviction(model: PreTrainedModel, method: Method, num_tokens: int) -> None:
    """Refuse what a method that drops tokens cannot attend to.

    Raises:
        UnsupportedModelError: a layer has a window of fewer than `num_tokens`, a soft cap or learned sink logits.
    """
    if not isinstance(method, LiteratureMethod) or method.eviction is None:
        return
    for layer, traits in enumerate(layer_traits(model)):
        if not traits.is_plain(num_tokens):
            raise UnsupportedModelError(
                f"Layer {layer} of this model has a sliding window, a logits soft cap or learned sink logits, and "
                f"{method.name} evicts by plain attention: evaluate it with another method."
            )


def strongest_so_far(magnitude: torch.Tensor, number: int) -> torch.Tensor:
    """The last query for which each token is among the `number` largest of those up to it; earlier ones win a tie.

    Args:
        magnitude: (num_windows, num_tokens).
        number: how many are kept.

    Returns:
        (num_windows, num_tokens) int64, ALWAYS where no later token of the window outdoes it, -1 where it never was.
    """
    positions = torch.arange(magnitude.shape[1], device=magnitude.device)
    own, other = magnitude[:, :, None], magnitude[:, None, :]
    outdoes = (other > own) | ((other == own) & (positions < positions[:, None]))
    among = outdoes.cumsum(-1) < number
    last = among.sum(-1) - 1
    # Counting from 0 takes in the queries before the token itself, which do not matter unless it never was among them.
    return torch.where(among[..., -1], ALWAYS, torch.where(last >= positions, last, -1))
