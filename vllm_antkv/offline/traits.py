"""What the attention layers of a loaded Hugging Face model are: found by running them, not by the model's name.

How a layer turns its keys is found with the probe of `ops.rope_detection`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.offline.capture_attention import layer_of, replaced
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.ops.rope_detection import detect_rope, transformers_tables

#: Tokens of the probe that are looked at, and those before, by which the states of other layers become the same.
_PROBE_TOKENS, _WARM_UP = 64, 192


@dataclass(frozen=True)
class LayerTraits:
    """One attention layer.

    index: among all decoder layers.
    turn: which of the model's ways of turning is its own (`_candidates`); -1 where none is.
    window: tokens that a query sees, itself included; None: all before it.
    soft_cap: of the logits, or None.
    has_sink_logits: whether a learned logit per head takes part in the softmax.
    source: the layer whose K and V it attends to; None: its own.
    """

    index: int
    turn: int
    window: int | None
    soft_cap: float | None
    has_sink_logits: bool
    source: int | None

    def is_plain(self, num_tokens: int) -> bool:
        """Whether every query of so many tokens sees all before it, by logits that are products, and nothing else."""
        sees_all = self.window is None or self.window >= num_tokens
        return sees_all and self.soft_cap is None and not self.has_sink_logits


_known: WeakKeyDictionary[PreTrainedModel, list[LayerTraits]] = WeakKeyDictionary()


def layer_traits(model: PreTrainedModel) -> list[LayerTraits]:
    """The traits of every attention layer, in model order. A model is probed once.

    Raises:
        UnsupportedModelError: layers do not all hand K and V to the attention interface, or turn K in another way than
            by a table of cosines and sines.
    """
    if model not in _known:
        _known[model] = _probe(model)
    return _known[model]


def rotary_tables(model: PreTrainedModel, num_positions: int) -> list[RotaryTable]:
    """What turns queries and keys, layer by layer; a table without channels where nothing does.

    Args:
        num_positions: how many positions tables have; those that depend on the length are for this one.

    Raises UnsupportedModelError as `layer_traits` does.
    """
    traits = layer_traits(model)
    tables = list(_candidates(model, num_positions)) if any(layer.turn >= 0 for layer in traits) else []
    # -1 takes the last.
    tables.append(RotaryTable(*torch.zeros(2, num_positions, 0, device=model.device)))
    return [tables[layer.turn] for layer in traits]


def _probe(model: PreTrainedModel) -> list[LayerTraits]:
    identity = ModelIdentity.from_hf_config(model.config)
    num_layers, first = identity.num_layers, 0 if identity.attention_layers is None else _WARM_UP
    found: dict[int, LayerTraits] = {}
    keys: dict[int, torch.Tensor] = {}
    # Without a rotary module, positions are embedded, or there are none.
    turns = any("rotary" in type(module).__name__.lower() for module in model.modules())
    tables = list(_candidates(model, first + _PROBE_TOKENS)) if turns else []

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        layer = layer_of(module)
        found[layer] = LayerTraits(
            identity.decoder_indices[layer],
            _detect_rope(model, layer, key[0, :, first:].transpose(0, 1).float(), tables) if turns else -1,
            options.get("sliding_window"),
            options.get("softcap") or None,
            options.get("s_aux") is not None,
            next((source for source, handed in keys.items() if handed is key), None),
        )
        keys.setdefault(layer, key)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None

    # Neither BOS nor padding, whose embedding may be zero.
    token = model.config.get_text_config().vocab_size // 2
    with torch.no_grad(), replaced(model, attend):
        model(torch.full((1, first + _PROBE_TOKENS), token, device=model.device), use_cache=False)
    if sorted(found) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {num_layers} layers with attention, of which {len(found)} hand K and V to "
            "transformers' attention interface, where they are taken: it cannot be evaluated offline, but by "
            "`antkv eval served`."
        )
    return [found[layer] for layer in range(num_layers)]


def _detect_rope(model: PreTrainedModel, layer: int, keys: torch.Tensor, tables: list[RotaryTable]) -> int:
    """See `ops.rope_detection.detect_rope`; keys (num_tokens, num_kv_heads, head_size)."""
    if not keys.isfinite().all():
        raise UnsupportedModelError(
            f"K of layer {layer} is not a number: the model's weights are damaged, or too large for their dtype."
        )
    positions = torch.arange(len(tables[0].cos), device=keys.device)[-len(keys) :]
    turn = detect_rope(keys, positions, tables, model.dtype)
    if turn is None:
        raise UnsupportedModelError(
            f"The RoPE of layer {layer} of {type(model).__name__} is not a table of cosines and sines over positions "
            "alone: it cannot be calibrated or evaluated offline."
        )
    return turn


def _candidates(model: PreTrainedModel, num_positions: int) -> Iterator[RotaryTable]:
    """Every table that the model's rotary module may mean, in both styles."""
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    if rotary is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no rotary position embedding that can be read.")
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    yield from transformers_tables(rotary, num_positions, kinds, model.device)
