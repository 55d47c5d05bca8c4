"""Rotary position embedding and its inverse, from a table of cosines and sines.

Keys are coded before RoPE (AnTKV, section 4.1, after KVQuant), but an attention layer is handed rotated keys: rows are
un-rotated before they are coded and rotated again after they are decoded, always with the model's own table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of one rotary module.

    cos, sin: (max_position, rotary_dim / 2) float32; with YaRN or LongRoPE they carry its magnitude too.
    is_neox_style: channel `c` rotates with `c + rotary_dim / 2` (Llama), else with its neighbour (GPT-J).
    sections: (rotary_dim / 2,) int64, which of a token's three positions, in time, height and width, each pair of
        channels rotates by (M-RoPE). None: it has one.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_neox_style: bool = True
    sections: torch.Tensor | None = None

    @property
    def rotary_dim(self) -> int:
        """Channels that rotate; the others pass."""
        return 2 * self.cos.shape[-1]

    def to(self, device: torch.device | str) -> "RotaryTable":
        """The same table on another device."""
        sections = None if self.sections is None else self.sections.to(device)
        return RotaryTable(self.cos.to(device), self.sin.to(device), self.is_neox_style, sections)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of tokens, (..., rotary_dim / 2) each.

        positions: (...) integer, or (..., 3) where there are `sections`.
        """
        index = positions.long()
        if self.sections is None:
            return self.cos[index], self.sin[index]
        index, pairs = index[..., self.sections], torch.arange(len(self.sections), device=index.device)
        return self.cos[index, pairs], self.sin[index, pairs]


def interleaved(table: RotaryTable, head_size: int, sub_vector_size: int) -> list[int]:
    """Channels of a head in an order that gives every sub-vector some of each frequency.

    Neighbouring channels rotate at similar speeds and carry similarly much: as they come, some sub-vectors would hold
    most of a key, and others, with as many centroids, next to nothing (`docs/research/ablations.md`). Pairs stay
    what they are to RoPE: of n sub-vectors that hold one channel each of the pairs, number s takes the pairs s, s + n,
    s + 2 n, ...

    Returns:
        the channel of the model that stands at each place; as they come where sub-vectors do not divide the channels
        that rotate.
    """
    num_pairs = table.rotary_dim // 2
    num_groups, rest = divmod(num_pairs if table.is_neox_style else table.rotary_dim, sub_vector_size)
    if num_groups == 0 or rest or num_pairs % num_groups:
        return list(range(head_size))
    pairs = [pair for first in range(num_groups) for pair in range(first, num_pairs, num_groups)]
    if table.is_neox_style:
        rotating = [*pairs, *(pair + num_pairs for pair in pairs)]
    else:
        rotating = [channel for pair in pairs for channel in (2 * pair, 2 * pair + 1)]
    return [*rotating, *range(table.rotary_dim, head_size)]


def reordered(table: RotaryTable, order: Sequence[int]) -> RotaryTable:
    """The table for rows whose channels stand in `order`; ValueError where that parts a pair."""
    num_pairs = table.rotary_dim // 2
    if table.is_neox_style:
        pairs, partners = list(order[:num_pairs]), list(order[num_pairs : 2 * num_pairs])
        kept = all(pair < num_pairs for pair in pairs) and partners == [pair + num_pairs for pair in pairs]
    else:
        first, second = order[0 : 2 * num_pairs : 2], order[1 : 2 * num_pairs : 2]
        pairs = [channel // 2 for channel in first]
        kept = all(a % 2 == 0 and b == a + 1 for a, b in zip(first, second, strict=True))
    if not kept or any(pair >= num_pairs for pair in pairs):
        raise ValueError("the order parts channels that RoPE rotates together")
    cos, sin = table.cos[:, pairs].contiguous(), table.sin[:, pairs].contiguous()
    return RotaryTable(cos, sin, table.is_neox_style, None if table.sections is None else table.sections[pairs])


def pair_sums(values: torch.Tensor, table: RotaryTable | None) -> torch.Tensor:
    """(n, head_size) with, for channels that rotate together, the sum of both; others as they are."""
    if table is None or not table.rotary_dim:
        return values
    rotating, rest = values.split([table.rotary_dim, values.shape[1] - table.rotary_dim], 1)
    if table.is_neox_style:
        pairs = rotating.unflatten(1, (2, -1)).sum(1).repeat(1, 2)
    else:
        pairs = rotating.unflatten(1, (-1, 2)).sum(2).repeat_interleave(2, 1)
    return torch.cat([pairs, rest], 1)


def rotate(rows: torch.Tensor, positions: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Apply RoPE.

    Args:
        rows: (..., num_heads, head_size) floating point.
        positions: as in `RotaryTable.angles`.

    Returns:
        Same shape and dtype as `rows`.
    """
    cos, sin = _factors(rows, positions, table)
    return _rotate(rows, cos, sin, table)


def unrotate(rows: torch.Tensor, positions: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Undo `rotate`. Divides by cos^2 + sin^2, which is not 1 where the table carries a magnitude or is rounded."""
    cos, sin = _factors(rows, positions, table)
    norm = cos * cos + sin * sin
    return _rotate(rows, cos / norm, -sin / norm, table)


def rotated_gradient(gradient: torch.Tensor, positions: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """The gradient by rows before `rotate`, from that by rows after it; shapes as there."""
    cos, sin = _factors(gradient, positions, table)
    return _rotate(gradient, cos, -sin, table)


def _factors(rows: torch.Tensor, positions: torch.Tensor, table: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = table.angles(positions)
    return cos.unsqueeze(-2).to(rows.dtype), sin.unsqueeze(-2).to(rows.dtype)


def _rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    rotating, passing = rows[..., : table.rotary_dim], rows[..., table.rotary_dim :]
    if table.is_neox_style:
        first, second = rotating.chunk(2, dim=-1)
    else:
        first, second = rotating[..., 0::2], rotating[..., 1::2]
    new_first = first * cos - second * sin
    new_second = second * cos + first * sin
    if table.is_neox_style:
        rotated = torch.cat((new_first, new_second), dim=-1)
    else:
        rotated = torch.stack((new_first, new_second), dim=-1).flatten(-2)
    return torch.cat((rotated, passing), dim=-1)


def angles_are_linear(table: RotaryTable) -> bool:
    """Whether rotating by one position and then by another is rotating by their sum, up to the magnitude.

    True for all multiples of fixed frequencies. Kernels then rotate by a tile's position and by the offset in the tile,
    and read few rows of the table.
    """
    rotations = torch.complex(table.cos, table.sin)
    offsets = torch.tensor([1, 31, 127], device=rotations.device)
    bases = torch.arange(0, max(len(rotations) - 127, 0), 128, device=rotations.device)
    if len(bases) == 0:
        return True
    error = rotations[bases, None] * rotations[offsets] / rotations[0].abs() - rotations[bases[:, None] + offsets]
    # Models compute angles in float32, so those of far positions are rounded to about that many radians.
    rounding = bases[:, None, None] * 2.0**-22
    return bool((error.abs() <= 1e-3 + rounding).all())
