"""What lies in a block of vLLM's pool, and its pages one by one. This module imports no vLLM."""

from dataclasses import dataclass

import torch

from vllm_antkv.config import VQ_BLOCK_SIZE


@dataclass(frozen=True)
class BlockPlan:
    """What a block of vLLM's pool has to hold.

    num_pages: VQ pages of each layer.
    state_bytes: of a layer that keeps a state, per KV head of the layers that attend; 0: there are none.
    num_exact: unquantised layers, whose pages lie beside the VQ pages.
    draft_bytes: per KV head of the model, of the pages of a model that drafts, for the tokens of a VQ page.
    score_slots: of a recency page, one more than there are drafts in a step.
    """

    num_pages: int = 1
    state_bytes: int = 0
    num_exact: int = 0
    draft_bytes: int = 0
    score_slots: int = 1

    @property
    def num_tokens(self) -> int:
        """Whose codes it has."""
        return self.num_pages * VQ_BLOCK_SIZE


#: Of a model in which all layers attend.
ONE_PAGE = BlockPlan()


def one_by_one(raw: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Pages of 128 tokens of a layer, of its raw blocks.

    vLLM lays the bytes of a layer side by side in a block. Here the pages of all layers for the same tokens lie side
    by side instead: page `j` of block `b` is page `b * num_pages + j` in a pool of smaller blocks, for every layer,
    whatever its page's size. All layers of a block must be viewed so.

    Args:
        raw: (num_blocks, heads, 1, num_pages * page_bytes), whose first block is the first one of its storage.
        num_pages: of the layer, in a block.

    Returns:
        (num_blocks * num_pages, heads, 1, page_bytes), a view of other bytes where a block has several pages.
    """
    if num_pages == 1:
        return raw
    num_blocks, heads, _, num_bytes = raw.shape
    page, stride = num_bytes // num_pages, raw.stride(0) // num_pages
    # A page lies behind those of the layers before its own, which are as many bytes for all blocks of them.
    return raw.as_strided(
        (num_blocks * num_pages, heads, 1, page), (stride, page, page, 1), raw.storage_offset() // num_pages
    )
