"""How an attention layer rotates its keys, found by looking at them instead of at the model's name.

A probe is one token over and over, with attention that passes values on. Hidden states are then the same at all
positions, in every layer, and so are keys before RoPE: how a layer rotates its keys is the way of rotating back after
which they are equal again.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from vllm_antkv.ops.rope import RotaryTable, unrotate

#: Keys that are rotated back differ by rounding alone, relative to their length.
_EQUAL = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def detect_rope(
    keys: torch.Tensor, positions: torch.Tensor, tables: Sequence[RotaryTable], dtype: torch.dtype
) -> int | None:
    """Which table rotates the keys of a probe back to equal rows; -1: they are equal as they are; None: none of them.

    Args:
        keys: (num_tokens, num_kv_heads, head_size) float32.
        positions: (num_tokens,) integer.
        tables: those that the model may mean.
        dtype: in which the model computes.
    """
    spreads = {-1: _spread(keys)}
    for index, table in enumerate(tables):
        if table.rotary_dim <= keys.shape[-1]:
            spreads[index] = _spread(unrotate(keys, positions, table))
    best = min(spreads, key=spreads.__getitem__)
    return best if spreads[best] <= _EQUAL[dtype] else None


def _spread(rows: torch.Tensor) -> float:
    """How much rows differ from their mean over tokens, relative to their length."""
    return float((rows - rows.mean(0)).norm() / rows.norm().clamp(min=torch.finfo(rows.dtype).tiny))


def transformers_tables(
    rotary: nn.Module, num_positions: int, kinds: Iterable[str], device: torch.device
) -> Iterator[RotaryTable]:
    """Every table that a rotary module of transformers may mean, in both styles.

    Args:
        rotary: the module.
        num_positions: how many positions tables have; those that depend on the length are for this one.
        kinds: of layers, from which a module chooses that has a table for each.
        device: of the module and of the tables.
    """
    # At position 0 nothing is rotated, and pairs of channels cannot be told from others.
    for cos, sin in _rotations(rotary, max(num_positions, 2), kinds, device):
        for is_neox_style in (True, False):
            yield RotaryTable(cos[:num_positions].contiguous(), sin[:num_positions].contiguous(), is_neox_style)


def _rotations(
    rotary: nn.Module, num_positions: int, kinds: Iterable[str], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines, a column for each pair of channels, of every kind of layer that the module knows.

    The positions go in as one sequence, so that tables which depend on the length (dynamic NTK, LongRoPE) are those the
    model uses for a window of that length.
    """
    positions = torch.arange(num_positions, device=device)[None]
    # The module answers in the dtype of its first argument; rounded to bfloat16 the inverse would lose 3 digits of K.
    like = torch.zeros(1, dtype=torch.float32, device=device)
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        kinds = ()
    for tables in [rotary(like, positions, kind) for kind in dict.fromkeys(kinds)] or [rotary(like, positions)]:
        if torch.is_tensor(tables):
            # Complex rotations, as in Llama 4.
            yield tables[0].real.float(), tables[0].imag.float()
            continue
        cos, sin = (table[0].float() for table in tables)
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]):
            yield cos[:, :half], sin[:, :half]
        elif torch.equal(cos[:, 0::2], cos[:, 1::2]):
            yield cos[:, 0::2], sin[:, 0::2]
        else:
            yield cos, sin
