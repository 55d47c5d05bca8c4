"""Asymmetric round to nearest, the scalar quantiser that RTN, KIVI, LogQuant, SKVQ and TurboQuant's values share."""

import torch

#: Bits of a scale and of a zero point, each kept in float16.
PARAMETER_BITS = 16


def round_to_grid(
    groups: torch.Tensor, bits: int, clip: float | torch.Tensor = 1.0, parameters: torch.dtype = torch.float16
) -> torch.Tensor:
    """Replace each value by the nearest of 2^bits evenly spaced levels between the ends of its group.

    Scale and zero point are rounded to the precision in which they are stored before codes are taken.

    Args:
        groups: (..., group_size) floating point.
        bits: bits per code.
        clip: multiplies both ends; a tensor must broadcast to (..., 1).
        parameters: dtype in which scale and zero point are stored.

    Returns:
        Same shape and dtype.
    """
    low, high = (end * clip for end in groups.aminmax(dim=-1, keepdim=True))
    limit, top = torch.finfo(parameters).max, 2**bits - 1
    scale = ((high - low) / top).clamp(max=limit).to(parameters).to(groups)
    zero = low.clamp(-limit, limit).to(parameters).to(groups)
    # Where all values of a group are equal the scale is 0, and any code gives the zero point.
    codes = ((groups - zero) / scale.clamp(min=torch.finfo(groups.dtype).tiny)).round().clamp(0, top)
    return codes * scale + zero


def group_size(num_channels: int, wanted: int) -> int:
    """The largest size up to `wanted` that divides the channels of a token evenly."""
    return max(size for size in range(1, wanted + 1) if num_channels % size == 0)


def per_token(rows: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Groups of neighbouring channels of one token, over the heads as they lie.

    Args:
        rows: (num_windows, num_tokens, num_kv_heads, head_size).
        bits: bits per code.
        group: channels per group, a divisor of num_kv_heads * head_size.
    """
    groups = rows.flatten(-2).unflatten(-1, (-1, group))
    return round_to_grid(groups, bits).flatten(-2).view_as(rows)


def per_channel(rows: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Groups of `group` consecutive tokens of one channel; tokens of the last, incomplete group come back as they are.

    Args:
        rows: (num_windows, num_tokens, num_kv_heads, head_size).
        bits: bits per code.
        group: tokens per group.
    """
    closed = rows.shape[1] // group * group
    groups = rows[:, :closed].unflatten(1, (-1, group)).movedim(2, -1)
    return torch.cat((round_to_grid(groups, bits).movedim(-1, 2).flatten(1, 2), rows[:, closed:]), dim=1)
