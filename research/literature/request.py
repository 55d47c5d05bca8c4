"""What a method of the literature is built for, and what those have in common that learn or drop rows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from research.literature.method import Eviction, LiteratureMethod
from research.literature.retention import Retention, shared, sliding
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.offline.method import Quantiser

AnchorScope = Literal["block", "prompt"]


@dataclass(frozen=True)
class SmallCache:
    """What drops rows so that `size` tokens per KV head are left; see `Eviction`."""

    size: int

    def kept(self, num_tokens: int) -> int:
        """See `Eviction.kept`."""
        return min(self.size, num_tokens)


@dataclass(frozen=True)
class Sample:
    """What calibrated methods learn from: a text run through the model in full precision.

    text: where it comes from.
    plain_key, value: for every layer (num_windows, num_tokens, num_kv_heads, head_size) floating point, keys before
        RoPE.
    query_moments: for every layer, see there, means over windows.
    key_fisher, value_fisher: like rows, bfloat16: their squared gradients; empty where these were not asked for.
    sink_layer, sink_channels: the decoder layer after which few tokens stand out, and the channels in which they do.
    """

    text: str
    plain_key: list[torch.Tensor] = field(repr=False)
    value: list[torch.Tensor] = field(repr=False)
    query_moments: list[torch.Tensor] = field(repr=False)
    key_fisher: list[torch.Tensor] = field(repr=False)
    value_fisher: list[torch.Tensor] = field(repr=False)
    sink_layer: int
    sink_channels: tuple[int, ...]


@dataclass(frozen=True)
class LiteratureRequest(MethodRequest):
    """A model, the settings asked for, and what is learned from.

    anchor_scope: queries that vote for the anchors of antkv-*: those of the row's own VQ block, as the server has it,
        or all of the window, as the paper has it.
    own_recency: methods keep the recent tokens and sinks of their own papers, not `config.recency`.
    sample: None lets calibrated methods learn from the first tokens of each window.
    """

    anchor_scope: AnchorScope = "block"
    own_recency: bool = False
    sample: Sample | None = None

    def retention(self, window: int = 1, first: int = 0, learn: int = 0) -> Retention:
        """The recency that all methods share, or the paper's; the first `learn` tokens are learned from."""
        if not self.own_recency:
            recent, first = shared(self.config), 0
        else:
            recent = sliding(window)
        return Retention(recent, recent, first=first, learn=learn)

    def rounded(
        self, name: str, quantiser: Callable[[int], Quantiser], retention: Retention, **provenance: Any
    ) -> LiteratureMethod:
        """A method called `...-Nbit`, which rounds to so many bits."""
        bits = int(name.removesuffix("bit").rpartition("-")[2])
        return self.coded(name, bits, quantiser(bits), retention, **provenance)

    def coded(
        self, name: str, bits: float, quantiser: Quantiser, retention: Retention, **provenance: Any
    ) -> LiteratureMethod:
        """A method whose codes take so many bits per element."""
        recency = "own" if self.own_recency else self.config.recency
        return LiteratureMethod(
            name=name,
            nominal_bits=bits,
            config=self.config,
            quantiser=quantiser,
            retention=retention,
            provenance={"recency": recency, **provenance},
        )

    def evicting(self, name: str, eviction: Callable[[int], Eviction], **provenance: Any) -> LiteratureMethod:
        """A method called `...-N`, whose cache holds so many tokens: no codes, what is kept is kept in 16 bits."""
        size = int(name.rpartition("-")[2])
        return LiteratureMethod(
            name, 16.0, self.config, eviction=eviction(size), provenance={"cache": size, **provenance}
        )
