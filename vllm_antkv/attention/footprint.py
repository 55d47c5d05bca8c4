"""Effective bits: all KV bytes of a sequence over the elements it holds, with their parts."""

from dataclasses import dataclass

from vllm.config import VllmConfig

from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.presets import get_preset
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
    anchor_bytes = blocks * 2 * layout.anchor_rows * (layout.row_bytes + 2)
    row_bytes = 2 * layout.row_bytes + 2 * 4
    recency_bytes = pages * layout.recency_block_size * row_bytes
    # A recency page occupies a whole pool block, which is as large as the larger of the two pages.
    total = blocks * layout.pool_block_bytes + pages * layout.pool_block_bytes
    padding = total - code_bytes - anchor_bytes - recency_bytes
    return Footprint(length, code_bytes, anchor_bytes, recency_bytes, padding, 2 * length * layout.head_size)


def served_footprint(vllm_config: VllmConfig, settings: AntKVConfig) -> tuple[PageLayout, Footprint]:
    """Layout of the pages, and the cost of 8192 tokens, or of the longest length if that is shorter."""
    model_config = vllm_config.model_config
    preset = get_preset(vllm_config.cache_config.cache_dtype)
    layout = PageLayout.of(settings, preset, model_config.get_head_size(), model_config.dtype)
    return layout, footprint(layout, settings, min(8192, model_config.max_model_len))


def describe(vllm_config: VllmConfig, settings: AntKVConfig) -> list[str]:
    """Lines for the log: nominal and effective bits, with their parts."""
    layout, cost = served_footprint(vllm_config, settings)
    preset, model_config = layout.preset, vllm_config.model_config
    return [
        f"{preset.name}: {preset.nominal_bits:g} nominal bits per element, {cost.bits(cost.total):.3f} effective at "
        f"{cost.length} tokens = codes {cost.bits(cost.codes):.3f} + anchors {cost.bits(cost.anchors):.3f} + recent "
        f"and prefix rows {cost.bits(cost.recency):.3f} + padding {cost.bits(cost.padding):.3f} "
        f"({8 * model_config.dtype.itemsize} bits with auto)"
    ]
