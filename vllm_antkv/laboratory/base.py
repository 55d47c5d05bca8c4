"""What the methods of the literature have in common: what they are built for, what they learn from, what they store."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from vllm_antkv.codebook import Codebook, ModelIdentity, find_codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.method import AnchorScope, Eviction, Method, Quantiser
from vllm_antkv.offline.retention import Retention, shared, sliding


class CountedQuantiser(Quantiser, Protocol):
    """A quantiser of the literature, which says what it stores; the engine does not page it."""

    def element_bits(self, identity: ModelIdentity, num_tokens: int) -> tuple[float, float]:
        """Bits stored per K element and per V element of the tokens that are quantised.

        Counts codes, scales, zero points and outliers, and tables that are learned anew for each sequence, spread over
        its `num_tokens` tokens. Tables learned from a calibration text are per model and not counted.
        """
        ...


@dataclass(frozen=True)
class SmallCache:
    """What drops rows so that `size` tokens per KV head are left; see `Eviction`."""

    size: int

    def kept(self, num_tokens: int) -> int:
        """See `Eviction.kept`."""
        return min(self.size, num_tokens)


@dataclass(frozen=True)
class Sample:
    """What calibrated methods of the literature learn from: a text run through the model in full precision.

    text: where it comes from.
    key, plain_key, value: for every layer (num_windows, num_tokens, num_kv_heads, head_size) floating point; `key` is
        after RoPE and `plain_key` before.
    sink_layer, sink_channels: the decoder layer after which few tokens stand out, and the channels in which they do.
    """

    text: str
    key: list[torch.Tensor] = field(repr=False)
    plain_key: list[torch.Tensor] = field(repr=False)
    value: list[torch.Tensor] = field(repr=False)
    sink_layer: int
    sink_channels: tuple[int, ...]


@dataclass(frozen=True)
class MethodRequest:
    """What a method is built for.

    model_name: folder or Hugging Face name of the model, for the messages and for finding codebooks.
    identity: the model's sizes.
    codebooks: folder with codebooks; None looks where the server looks.
    config: the settings asked for; a method takes those it has.
    own_recency: methods of the literature keep the recent tokens and sinks of their own papers, not `config.recency`.
    sample: None lets calibrated methods learn from the first tokens of each window.
    anchor_scope: as in `Method`.
    """

    model_name: str
    identity: ModelIdentity
    codebooks: Path | None
    config: AntKVConfig
    own_recency: bool = False
    sample: Sample | None = None
    anchor_scope: AnchorScope = "block"

    def codebook(self, preset: str) -> Codebook:
        """What the server would load; CodebookError when there is none, or a bad one."""
        folder = None if self.codebooks is None else str(self.codebooks)
        return Codebook.load(find_codebook(self.model_name, self.identity, preset, folder), preset, self.identity)

    def retention(self, window: int = 1, first: int = 0, learn: int = 0) -> Retention:
        """The recency that all methods share, or the paper's; the first `learn` tokens are learned from."""
        if not self.own_recency:
            recent, first = shared(self.config), 0
        else:
            recent = sliding(window)
        return Retention(recent, recent, first=first, learn=learn)

    def rounded(
        self, name: str, quantiser: Callable[[int], Quantiser], retention: Retention, **provenance: Any
    ) -> Method:
        """A method called `...-Nbit`, which rounds to so many bits."""
        bits = int(name.removesuffix("bit").rpartition("-")[2])
        recency = "own" if self.own_recency else self.config.recency
        return Method(
            name=name,
            nominal_bits=bits,
            config=self.config,
            quantiser=quantiser(bits),
            retention=retention,
            provenance={"recency": recency, **provenance},
        )

    def evicting(self, name: str, eviction: Callable[[int], Eviction], **provenance: Any) -> Method:
        """A method called `...-N`, whose cache holds so many tokens: no codes, what is kept is kept in 16 bits."""
        size = int(name.rpartition("-")[2])
        return Method(name, 16.0, self.config, eviction=eviction(size), provenance={"cache": size, **provenance})


#: Builds the method called `name`; raises AntKVError when what it needs is missing.
Builder = Callable[[str, MethodRequest], Method]
