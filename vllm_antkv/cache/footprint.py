"""Effective bits: all KV bytes of a sequence over the elements it holds, with their parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_antkv.cache.pages import PageLayout, pool_block_bytes
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.select.retention import page_retention


@dataclass(frozen=True)
class Footprint:
    """Bytes of a sequence of `length` tokens in some layers, per KV head, and the bits per K or V element they make.

    exact: of the rows of layers that are not coded at all.
    """

    length: int
    codes: int
    anchors: int
    recency: int
    exact: int
    padding: int
    elements: int

    @property
    def total(self) -> int:
        """All bytes taken from the pool."""
        return self.codes + self.anchors + self.recency + self.exact + self.padding

    def bits(self, num_bytes: int) -> float:
        """Bits per element of a part."""
        return 8 * num_bytes / self.elements


def footprint(layouts: Sequence[PageLayout], settings: AntKVConfig, length: int, num_exact: int = 0) -> Footprint:
    """What a sequence of `length` tokens costs once it is computed, in the layers of these layouts.

    num_exact: layers beside them that are not coded.
    """
    first, blocks = layouts[0], -(-length // VQ_BLOCK_SIZE)
    retention = page_retention(settings, max(length, 1), first.recency_block_size, 0)
    pages = len(retention.pages_at(length))
    code_bytes = sum(2 * layout.preset.code_bytes(layout.head_size) for layout in layouts) * length
    anchor_bytes = len(layouts) * blocks * 2 * first.anchor_rows * (first.anchor_row_bytes + 2)
    row_bytes = 2 * first.row_bytes + 2 * 4
    recency_bytes = len(layouts) * pages * first.recency_block_size * row_bytes
    # A page of either class occupies a whole pool block, which is as large as the larger of the two.
    total = (blocks + pages) * pool_block_bytes(layouts, num_exact)
    exact_bytes = num_exact * 2 * first.row_bytes * length
    padding = total - code_bytes - anchor_bytes - recency_bytes - exact_bytes
    elements = 2 * length * first.head_size * (len(layouts) + num_exact)
    return Footprint(length, code_bytes, anchor_bytes, recency_bytes, exact_bytes, padding, elements)
