"""What a method of the registry is: how a row comes back from the cache, and which rows stay in full precision."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from vllm_antkv.codebook import SinkRule
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.retention import Retention
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import Preset

#: Queries that vote for anchors.
AnchorScope = Literal["block", "prompt"]


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


@dataclass(frozen=True)
class Method:
    """One way of keeping a KV cache: as the engine serves it, as a paper of the literature quantises, or by eviction.

    name: as given to `--method`.
    nominal_bits: bits per K or V element, codes alone.
    config: what is kept beside the codes (recency, prefix, anchors, sinks).
    quantiser: None leaves rows as they are; the model's own attention is untouched where there is no eviction either.
    layers: the formats in which the serving engine pages the layers; empty for a method that is only evaluated offline.
    sinks: how attention sinks are recognised, when `config` keeps them and the model has any.
    provenance: what else the figures depend on (which codebook), for the `settings` of the JSON.
    retention: of a method of the literature, the rows that stay exact instead of what `config` says.
    num_sinks: with a `retention`, how many sinks are kept: the strongest so far by `sinks`, whatever its threshold.
    eviction: rows are dropped instead of quantised.
    key_errors: `Codebook.k_errors`, for the correction of logits; None: they are not corrected.
    k_scale: as in `Codebook`: K that the quantiser sees is scaled, and queries the other way round.
    anchor_scope: queries that vote for anchors: those of the row's own VQ block, as the server has it, or all of the
        window, as the paper has it.
    """

    name: str
    nominal_bits: float
    config: AntKVConfig
    quantiser: Quantiser | None = None
    layers: tuple[Preset, ...] = ()
    sinks: SinkRule | None = None
    provenance: dict[str, Any] | None = None
    retention: Retention | None = None
    num_sinks: int = 0
    eviction: Eviction | None = None
    key_errors: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    anchor_scope: AnchorScope = "block"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that produced a figure, for its JSON."""
        of_config = self.quantiser is not None and self.retention is None
        chosen = self.config.model_dump(exclude={"codebooks", "prefill_reads_cache"}) if of_config else {}
        chosen |= {"anchor_scope": self.anchor_scope} if of_config else {}
        return {**chosen, **(self.provenance or {})}
