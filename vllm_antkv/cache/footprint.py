"""Effective bits: all KV bytes of a sequence, by part, over its elements."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from vllm_antkv.cache.pages import PageLayout, pool_block_bytes
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.select.retention import page_retention


@dataclass(frozen=True)
class Footprint:
    """Bytes of a sequence of `length` tokens in some layers, per KV head, and the bits per K or V element.

    exact: K and V of layers that are not quantised.
    padding: the rest of the pages, position pages included (`cache.positions`).
    elements: K and V elements of the tokens that later queries see, at most a window in layers that have one.
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


def footprint(
    layouts: Sequence[PageLayout],
    settings: AntKVConfig,
    length: int,
    windows: Sequence[int | None] = (),
    exact_windows: Sequence[int | None] = (),
    position_bytes: int = 0,
) -> Footprint:
    """Bytes that a sequence of `length` tokens takes once it is computed.

    vLLM may pad groups of layers to equal size; that padding is not counted.

    Args:
        layouts: of every quantised layer.
        settings: the antkv settings.
        length: tokens.
        windows: of these layers, None for a layer without one; empty: no layer has one.
        exact_windows: windows of the layers that are not quantised.
        position_bytes: as in `pool_block_bytes`.
    """
    windows = windows or [None] * len(layouts)
    costs = []
    for window in dict.fromkeys((*windows, *exact_windows)):
        coded = [layout for layout, own in zip(layouts, windows, strict=True) if own == window]
        exact = sum(own == window for own in exact_windows)
        costs.append(_of_layers(coded, [layouts[0]] * exact, settings, length, window, position_bytes))
    names = [field.name for field in fields(Footprint) if field.name != "length"]
    return Footprint(length, **{name: sum(getattr(cost, name) for cost in costs) for name in names})


def _of_layers(
    layouts: Sequence[PageLayout],
    exact: Sequence[PageLayout],
    settings: AntKVConfig,
    length: int,
    window: int | None,
    position_bytes: int,
) -> Footprint:
    """Bytes of layers with the same window; exact: layouts that layers without quantisation would have."""
    first = (*layouts, *exact)[0]
    seen = length if window is None else min(length, window)
    # A block is freed once the next query sees none of its tokens.
    block_size = first.num_pages * VQ_BLOCK_SIZE
    freed = 0 if window is None else max(length - window + 1, 0) // block_size
    blocks = -(-length // block_size) - freed
    retention = page_retention(settings, max(length, 1), first.recency_block_size, 0, window)
    pages = len(retention.pages_at(length))
    code_bytes = sum(2 * layout.preset.code_bytes(layout.head_size) for layout in layouts) * seen
    anchor_bytes = len(layouts) * blocks * first.num_pages * 2 * first.anchor_rows * (first.anchor_row_bytes + 2)
    row_bytes = 2 * first.row_bytes + 2 * 4
    recency_bytes = len(layouts) * pages * first.recency_block_size * row_bytes
    exact_bytes = len(exact) * 2 * first.row_bytes * seen
    # Unquantised layers with a window have their own pages, not beside VQ pages.
    num_packed = len(exact) if layouts and window is None else 0
    # A page of either class occupies a whole pool block, which has the size of the larger class.
    total = (blocks + pages) * pool_block_bytes(layouts, num_packed, position_bytes) if layouts else 0
    total += blocks * (len(exact) - num_packed) * first.exact_page_bytes
    padding = total - code_bytes - anchor_bytes - recency_bytes - exact_bytes
    elements = 2 * seen * first.head_size * (len(layouts) + len(exact))
    return Footprint(length, code_bytes, anchor_bytes, recency_bytes, exact_bytes, padding, elements)
