"""Position pages: with M-RoPE a token has three positions (time, height, width), and K is rotated by all of them.

They differ from its place in the sequence: tokens of an image share the position in time, and the text behind it
continues from the largest. So they are cached like codes, one page per block for all layers, and a prefix-cache hit
includes them. 96 bits per token are 0.003 bits per element in the shape of Qwen2-VL-7B. This module imports no vLLM.
"""

import torch

from vllm_antkv.cache.pool_blocks import one_by_one
from vllm_antkv.config import VQ_BLOCK_SIZE

#: Positions of a token.
NUM_POSITIONS = 3
#: Bytes for the tokens of a VQ block, int32.
POSITION_PAGE_BYTES = VQ_BLOCK_SIZE * NUM_POSITIONS * 4


def view_positions(raw: torch.Tensor, num_pages: int = 1) -> torch.Tensor:
    """View raw blocks of uint8, as in `one_by_one`, as (all their pages, VQ_BLOCK_SIZE, 3) int32."""
    pages = one_by_one(raw, num_pages)[:, 0, 0].view(torch.uint8)
    return pages.view(torch.int32).unflatten(-1, (VQ_BLOCK_SIZE, NUM_POSITIONS))


def store_positions(pages: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
    """Write the positions of a step's tokens. Nothing waits for the device.

    Args:
        pages: as `view_positions` gives them.
        slots: (num_tokens,) int64, page * VQ_BLOCK_SIZE + offset of each token; negative for padding, which goes to
            the null block.
        positions: (3, num_tokens) integer.
    """
    slots = slots.clamp(min=0)
    pages[slots // VQ_BLOCK_SIZE, slots % VQ_BLOCK_SIZE] = positions.T.int()
