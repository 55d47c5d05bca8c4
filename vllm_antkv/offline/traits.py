"""What the attention layers of a loaded Hugging Face model are: found by running them, not by the model's name.

The probe is a window of one token over and over, with attention that passes values on. Its hidden states are then the
same at all positions, in every layer, and so are keys before RoPE. How a layer turns its keys is the way of turning
back after which they are equal again.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.taps import replaced
from vllm_antkv.ops.rope import RotaryTable, unrotate

#: Tokens of the probe.
_PROBE_TOKENS = 64
#: Keys that are turned back differ by rounding alone, relative to their length.
_EQUAL = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class LayerTraits:
    """One attention layer.

    turn: which of the model's ways of turning is its own (`_candidates`); -1 where none is.
    window: tokens that a query sees, itself included; None: all before it.
    soft_cap: of the logits, or None.
    has_sink_logits: whether a learned logit per head takes part in the softmax.
    """

    turn: int
    window: int | None
    soft_cap: float | None
    has_sink_logits: bool

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
    tables.append(_no_turn(model, num_positions))
    return [tables[layer.turn] for layer in traits]


def _probe(model: PreTrainedModel) -> list[LayerTraits]:
    num_layers = len(decoder_layers(model))
    found: dict[int, LayerTraits] = {}
    # Without a rotary module, positions are embedded, or there are none.
    turns = any("rotary" in type(module).__name__.lower() for module in model.modules())
    tables = list(_candidates(model, _PROBE_TOKENS)) if turns else []

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        found[layer] = LayerTraits(
            _turn_of(model, layer, key[0].transpose(0, 1).float(), tables) if turns else -1,
            options.get("sliding_window"),
            options.get("softcap") or None,
            options.get("s_aux") is not None,
        )
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None

    # Neither BOS nor padding, whose embedding may be zero.
    token = model.config.get_text_config().vocab_size // 2
    with torch.no_grad(), replaced(model, attend):
        model(torch.full((1, _PROBE_TOKENS), token, device=model.device), use_cache=False)
    if sorted(found) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {num_layers} layers, of which {len(found)} hand K and V to transformers' "
            "attention interface, where they are taken: it cannot be calibrated or evaluated offline."
        )
    return [found[layer] for layer in range(num_layers)]


def _turn_of(model: PreTrainedModel, layer: int, keys: torch.Tensor, tables: list[RotaryTable]) -> int:
    """Which table turns keys of the probe, (num_tokens, num_kv_heads, head_size), back to equal rows; -1: they are."""
    positions = torch.arange(len(keys), device=keys.device)
    spreads = {-1: _spread(keys)}
    for turn, table in enumerate(tables):
        if table.rotary_dim <= keys.shape[-1]:
            spreads[turn] = _spread(unrotate(keys, positions, table))
    best = min(spreads, key=spreads.__getitem__)
    if spreads[best] > _EQUAL[model.dtype]:
        raise UnsupportedModelError(
            f"Layer {layer} of {type(model).__name__} turns K otherwise than by its table of cosines and sines, "
            "or not by the position alone: it cannot be calibrated or evaluated offline."
        )
    return best


def _spread(rows: torch.Tensor) -> float:
    """How much rows differ from their mean over tokens, relative to their length."""
    return float((rows - rows.mean(0)).norm() / rows.norm().clamp(min=torch.finfo(rows.dtype).tiny))


def _no_turn(model: PreTrainedModel, num_positions: int) -> RotaryTable:
    return RotaryTable(*torch.zeros(2, num_positions, 0, device=model.device))


def _candidates(model: PreTrainedModel, num_positions: int) -> Iterator[RotaryTable]:
    """Every table that the model's rotary module may mean, in both styles."""
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    if rotary is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no rotary position embedding that can be read.")
    for cos, sin in _turns(model, rotary, num_positions):
        for is_neox_style in (True, False):
            yield RotaryTable(cos.contiguous(), sin.contiguous(), is_neox_style)


def _turns(
    model: PreTrainedModel, rotary: nn.Module, num_positions: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines, a column for each pair of channels, of every kind of layer that the module knows.

    The positions go in as one sequence, so that tables which depend on the length (dynamic NTK, LongRoPE) are those the
    model uses for a window of that length.
    """
    positions = torch.arange(num_positions, device=model.device)[None]
    # The module answers in the dtype of its first argument; rounded to bfloat16 the inverse would lose 3 digits of K.
    like = torch.zeros(1, dtype=torch.float32, device=model.device)
    kinds = {}
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        kinds = dict.fromkeys(model.config.get_text_config().layer_types)
    for found in [rotary(like, positions, kind) for kind in kinds] or [rotary(like, positions)]:
        if torch.is_tensor(found):
            # Complex turns, as in Llama 4.
            yield found[0].real.float(), found[0].imag.float()
            continue
        cos, sin = (table[0].float() for table in found)
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]):
            yield cos[:, :half], sin[:, :half]
        elif torch.equal(cos[:, 0::2], cos[:, 1::2]):
            yield cos[:, 0::2], sin[:, 0::2]
        else:
            yield cos, sin
