"""What a method is: how a row comes back from the cache, and which rows stay in full precision."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import torch

from vllm_antkv.codebook import ModelIdentity, SinkRule
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import Preset


@dataclass(frozen=True)
class LayerWindow:
    """The rows of one layer.

    layer: its index.
    query: (num_windows, num_tokens, num_heads, head_size), after RoPE.
    key, value: (num_windows, num_tokens, num_kv_heads, head_size), keys after RoPE.
    rules: how logits come about.
    rotary: the table that rotated `key`.
    source: the layer whose K and V these are; None: its own.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rules: LogitRules
    rotary: RotaryTable
    source: Self | None = None

    @property
    def owner(self) -> "LayerWindow":
        """The layer whose centroids code the rows, and whose queries vote on them."""
        return self if self.source is None else self.source


class Quantiser(Protocol):
    """What K and V rows look like once they are read back from the cache."""

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise and reconstruct the rows of a whole window.

        Row j may depend only on rows that the cache would hold when row j is first read through it.

        Args:
            layer: index of the attention layer.
            key, value: (num_windows, num_tokens, num_kv_heads, head_size) floating point; keys after RoPE, the first
                token at position 0.
            rotary: the table the keys were rotated with, for quantisers that work before RoPE.

        Returns:
            keys (after RoPE) and values, same shapes and dtype, in memory of their own.
        """
        ...


@dataclass(frozen=True)
class Method:
    """One way of keeping a KV cache: as the engine serves it, or another to compare with.

    name: as given to `--method`.
    nominal_bits: bits per K or V element, codes alone.
    config: what is kept beside the codes (recency, prefix, anchors, sinks).
    quantiser: None leaves rows as they are; with no `attention` either, the model's own is untouched.
    layers: the formats in which the serving engine pages the layers; empty for a method that is only evaluated offline.
    sinks: how attention sinks are recognised, when `config` keeps them and the model has any.
    provenance: what else the figures depend on (which codebook), for the `settings` of the JSON.
    attention: of a method that does not attend as the engine does; None: `attention.attend_window`.
    key_errors: `Codebook.k_errors`, for the correction of logits; None: they are not corrected.
    k_scale: as in `Codebook`: K that the quantiser sees is scaled, and queries the other way round.
    """

    name: str
    nominal_bits: float
    config: AntKVConfig
    quantiser: Quantiser | None = None
    layers: tuple[Preset, ...] = ()
    sinks: SinkRule | None = None
    provenance: dict[str, Any] | None = None
    attention: "Attention | None" = None
    key_errors: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that produced a figure, for its JSON."""
        if self.quantiser is None:
            return self.provenance or {}
        chosen = self.config.model_dump(exclude={"codebooks", "prefill_reads_cache"})
        return {**chosen, **(self.provenance or {})}

    def sinks_among(self, magnitude: torch.Tensor) -> torch.Tensor:
        """Which tokens are sinks, by the hidden states behind the layer of `sinks`.

        Args:
            magnitude: (num_windows, num_tokens, num_channels), of the channels of `sinks`.

        Returns:
            (num_windows, num_tokens) bool.
        """
        assert self.sinks is not None
        return (magnitude > self.sinks.threshold).any(-1)

    def stored_bits(self, identity: ModelIdentity, num_tokens: int, num_seen: int) -> float:
        """Per K or V element of the last `num_seen` of `num_tokens`, in a layer that the engine does not page."""
        del identity, num_tokens, num_seen
        return self.nominal_bits


#: Attention of one layer over whole windows; the last argument is what `Method.sinks_among` says, or None where no
#: sinks are known. Returns (num_windows, num_tokens, num_heads, head_size).
Attention: TypeAlias = Callable[[LayerWindow, Method, torch.Tensor | None], torch.Tensor]
