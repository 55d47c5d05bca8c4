"""Positions of tokens of which each has three: those of texts, of images, and any others."""

import torch

from vllm_antkv.cache.positions import NUM_POSITIONS


def draw_positions(generator: torch.Generator, length: int, max_len: int) -> torch.Tensor:
    """(length, 3): text, whose three positions are one and go on from the largest before, images, and any numbers."""
    parts, begin, left = [], 0, length
    while left > 0:
        kind, size = (int(torch.randint(bound, (), generator=generator)) for bound in (5, 150))
        text = begin + torch.arange(size + 1)
        if kind == 0:
            part = torch.randint(max_len, (size % 9, NUM_POSITIONS), generator=generator)
        elif kind == 1:
            rows, columns = torch.meshgrid(text[:9], text[:14], indexing="ij")
            part = torch.stack((torch.full_like(rows, begin), rows, columns), -1).flatten(0, 1)
        else:
            part = text[:, None].expand(-1, NUM_POSITIONS)
        parts.append(part[:left])
        begin, left = (begin + len(text)) % max_len, left - len(part)
    return torch.cat(parts).clamp(max=max_len - 1)
