"""What a method of the registry is: how a row comes back from the cache, and which rows stay in full precision."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from vllm_antkv.codebook import ModelIdentity, SinkRule
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import Preset


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
    """One way of keeping a KV cache.

    name: as given to `--method`.
    nominal_bits: bits per K or V element, codes alone.
    config: which rows stay in full precision beside their code (recency, prefix, anchors, sinks).
    quantiser: None leaves the model's own attention untouched.
    preset: the format in which the serving engine pages it; None for a method that is only evaluated offline.
    sinks: how attention sinks are recognised, when `config` keeps them and the model has any.
    provenance: what else the figures depend on (which codebook), for the `settings` of the JSON.
    """

    name: str
    nominal_bits: float
    config: AntKVConfig
    quantiser: Quantiser | None = None
    preset: Preset | None = None
    sinks: SinkRule | None = None
    provenance: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that produced a figure, for its JSON."""
        if self.quantiser is None:
            return {}
        chosen = self.config.model_dump(exclude={"codebooks", "prefill_reads_cache"})
        return {**chosen, **(self.provenance or {})}


@dataclass(frozen=True)
class MethodRequest:
    """What a method is built for.

    model_name: folder or Hugging Face name of the model, for the messages and for finding codebooks.
    identity: the model's sizes.
    codebooks: folder with codebooks; None looks where the server looks.
    config: the settings asked for; a method takes those it has.
    """

    model_name: str
    identity: ModelIdentity
    codebooks: Path | None
    config: AntKVConfig


#: Builds the method called `name`; raises AntKVError when what it needs is missing.
Builder = Callable[[str, MethodRequest], Method]
