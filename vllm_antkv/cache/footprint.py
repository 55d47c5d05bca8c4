"""Effective bits: all KV bytes of a sequence over the elements it holds, with their parts."""

from dataclasses import dataclass

from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.select.retention import page_retention


@dataclass(frozen=True)
class Footprint:
    """Bytes of a sequence of `length` tokens in one layer, per KV head, and the bits per K or V element they make."""

    length: int
    codes: int
    anchors: int
    recency: int
    padding: int
    elements: int

    @property
    def total(self) -> int:
        """All bytes taken from the pool."""
        return self.codes + self.anchors + self.recency + self.padding

    def bits(self, num_bytes: int) -> float:
        """Bits per element of a part."""
        return 8 * num_bytes / self.elements


def footprint(layout: PageLayout, settings: AntKVConfig, length: int) -> Footprint:
    """What a sequence of `length` tokens costs once it is computed."""
    blocks = -(-length // VQ_BLOCK_SIZE)
    retention = page_retention(settings, max(length, 1), layout.recency_block_size, 0)
    pages = len(retention.pages_at(length))
    code_bytes = 2 * layout.preset.code_bytes(layout.head_size) * length
    anchor_bytes = blocks * 2 * layout.anchor_rows * (layout.head_size + 2)
    row_bytes = 2 * layout.row_bytes + 2 * 4
    recency_bytes = pages * layout.recency_block_size * row_bytes
    # A recency page occupies a whole pool block, which is as large as the larger of the two pages.
    total = blocks * layout.pool_block_bytes + pages * layout.pool_block_bytes
    padding = total - code_bytes - anchor_bytes - recency_bytes
    return Footprint(length, code_bytes, anchor_bytes, recency_bytes, padding, 2 * length * layout.head_size)
