"""Byte layout of the pages, as typed views of the raw bytes that vLLM allocates.

Two allocations come from vLLM's block pool for every attention layer:

* a **VQ page** per 128 tokens: the codes of every token, then the block's anchors (K, V and their offsets in the
  block). An anchor slot stores the quantisation error of a K or V vector in FP8 (e4m3). Two slots, the first one even,
  store an unquantised vector, as for sinks (`select.anchors.EXACT_ANCHOR`). Codes and anchors share a block table, so
  they share a page. Models with M-RoPE have one more page beside those of all layers (`cache.positions`).
* a **recency page** per few tokens: unquantised K and V of the tokens that some query still sees so, and their
  Anchor Scores so far. A draft may be rejected, and what its query added must not count. So a page has S score slots,
  one more than there are drafts in a step: slot p % S has the scores after the query at p, and the next step continues
  with those of the last token that was accepted.

Layout of one (block, KV head), with B tokens per block, R anchor rows, D channels; a is half the bytes of a row in the
model dtype: D, and of a float32 model 2 D, of which e4m3 uses the first:

    VQ page       K codes [B, kb] | V codes [B, vb] | anchor K [R, a] | anchor V [R, a] | offsets int16 [2, R]
    recency page  K [T, D] | V [T, D] | scores float32 [S, 2, T]

K vectors are stored after RoPE, as attention uses them; codes stand for K before RoPE. This module imports no vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_antkv.cache.pool_blocks import ONE_PAGE, BlockPlan, one_by_one
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.presets import Preset

#: Sections and pages start at multiples of this, so that kernels can load 16 bytes at a time.
ALIGNMENT = 16
#: Offset of an unused anchor row.
NO_ANCHOR = -1
_RECENCY_BLOCK_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
#: Most tokens of a recency page in a block with one VQ page of each layer.
_MAX_BESIDE_ONE_PAGE = 32
#: VQ pages may grow by this share if that makes room for larger recency pages in the same pool block.
_MAX_GROWTH = 0.02


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PageLayout:
    """Sizes of the pages of one layer, per KV head.

    preset: of the layer.
    head_size: channels.
    itemsize: bytes of the model dtype.
    anchor_rows: anchor slots of K, and as many of V, per block (`AntKVConfig.anchor_rows`).
    recency_block_size: tokens per recency page, the same for all layers.
    padding: bytes at the end of a VQ page.
    num_pages: VQ pages of the layer in a block of the pool.
    score_slots: S above.
    """

    preset: Preset
    head_size: int
    itemsize: int
    anchor_rows: int
    recency_block_size: int
    padding: int
    num_pages: int = 1
    score_slots: int = 1

    @classmethod
    def of(
        cls, config: AntKVConfig, preset: Preset, head_size: int, dtype: torch.dtype, score_slots: int = 1
    ) -> "PageLayout":
        """The layout of every layer of a model whose layers all have this preset; otherwise as `page_layouts`."""
        return page_layouts(config, [preset], head_size, dtype, plan=BlockPlan(score_slots=score_slots))[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one full-precision K (or V) row."""
        return self.head_size * self.itemsize

    @property
    def code_section_bytes(self) -> int:
        """Bytes of the K (or V) codes of a block."""
        return _align(VQ_BLOCK_SIZE * self.preset.code_bytes(self.head_size))

    @property
    def anchor_section_bytes(self) -> int:
        """Bytes of the K (or V) anchor rows of a block."""
        return _align(self.anchor_rows * self.anchor_row_bytes)

    @property
    def anchor_row_bytes(self) -> int:
        """Bytes of an anchor slot: two hold an unquantised vector."""
        return self.row_bytes // 2

    @property
    def offset_section_bytes(self) -> int:
        """Bytes of the anchors' offsets."""
        return _align(2 * 2 * self.anchor_rows)

    @property
    def vq_page_bytes(self) -> int:
        """Bytes of a VQ page of one KV head."""
        sections = 2 * self.code_section_bytes + 2 * self.anchor_section_bytes + self.offset_section_bytes
        return sections + self.padding

    @property
    def exact_page_bytes(self) -> int:
        """Bytes of vLLM's own page of one KV head with as many tokens as a VQ page."""
        return 2 * VQ_BLOCK_SIZE * self.row_bytes

    @property
    def recency_page_bytes(self) -> int:
        """Bytes of a recency page of one KV head."""
        return _align(self.recency_block_size * (2 * self.row_bytes + self.score_slots * 2 * 4))


def page_layouts(
    config: AntKVConfig, presets: Sequence[Preset], head_size: int, dtype: torch.dtype, plan: BlockPlan = ONE_PAGE
) -> list[PageLayout]:
    """The layouts of a model's layers. Pages of one class of all layers share a block of vLLM's pool.

    VQ pages grow until a block of them holds a state. Recency pages have as many tokens as fit into that block.

    Args:
        config: how many anchors there are.
        presets: of every layer.
        head_size: channels.
        dtype: of the model.
        plan: what a block has to hold.

    Raises:
        SettingsError: a preset does not divide the head size.
    """
    for preset in presets:
        preset.num_sub_vectors(head_size)
    sizes = (head_size, dtype.itemsize, config.anchor_rows)
    counts = {"num_pages": plan.num_pages, "score_slots": plan.score_slots}
    layers = [PageLayout(preset, *sizes, 1, 0, **counts) for preset in presets]
    extra_bytes = plan.num_exact * layers[0].exact_page_bytes + plan.draft_bytes
    content = sum(layer.vq_page_bytes for layer in layers) + extra_bytes
    # Of all layers' pages of the same tokens, as what follows.
    of_states = -(-plan.state_bytes // plan.num_pages)
    limit = max(int(content * (1 + _MAX_GROWTH)), of_states)

    def needed(block_size: int) -> int:
        # Slightly more than the recency pages take: vLLM distinguishes pages by size, and must see two sizes.
        pages = (replace(layer, recency_block_size=block_size).recency_page_bytes + ALIGNMENT for layer in layers)
        return -(-sum(pages) // plan.num_pages)

    most = _MAX_BESIDE_ONE_PAGE if plan.num_pages == 1 else VQ_BLOCK_SIZE
    fitting = (size for size in _RECENCY_BLOCK_SIZES if size <= most and needed(size) <= limit)
    block_size = next(fitting, _RECENCY_BLOCK_SIZES[-1])
    missing = max(needed(block_size), of_states) - content
    padding = _align(-(-missing // len(layers))) if 0 < missing <= limit - content else 0
    return [replace(layer, recency_block_size=block_size, padding=padding) for layer in layers]


def pool_block_bytes(layers: Sequence[PageLayout], num_exact: int = 0, position_bytes: int = 0) -> int:
    """Bytes of a block of vLLM's pool, per KV head, all layers together: it fits the pages of either class.

    num_exact: as in `BlockPlan`.
    position_bytes: a KV head's share of a page of positions, where there are such pages (`cache.positions`).
    """
    extra_bytes = num_exact * layers[0].exact_page_bytes + position_bytes
    of_vq = layers[0].num_pages * (sum(layer.vq_page_bytes for layer in layers) + extra_bytes)
    return max(of_vq, sum(layer.recency_page_bytes for layer in layers))


@dataclass(frozen=True)
class VQPages:
    """Typed views of a layer's VQ pages; writing to them writes the cache.

    k_codes, v_codes: (num_pages, num_kv_heads, VQ_BLOCK_SIZE, code_bytes) uint8.
    k_anchors, v_anchors: (num_pages, num_kv_heads, anchor_rows, anchor_row_bytes) uint8: e4m3 in the first head_size
        bytes (`ops.reference.correction`), or half of an unquantised vector.
    anchor_offsets: (num_pages, num_kv_heads, 2, anchor_rows) int16, K then V; NO_ANCHOR where a slot is unused or the
        second of two; EXACT_ANCHOR is added for unquantised vectors.
    """

    k_codes: torch.Tensor
    v_codes: torch.Tensor
    k_anchors: torch.Tensor
    v_anchors: torch.Tensor
    anchor_offsets: torch.Tensor

    @classmethod
    def view(cls, raw: torch.Tensor, layout: PageLayout) -> "VQPages":
        """View raw blocks, as in `one_by_one`, with pages of `vq_page_bytes`, uint8 or int8."""
        sections = _Sections(one_by_one(raw, layout.num_pages))
        code_bytes = layout.preset.code_bytes(layout.head_size)
        codes = (VQ_BLOCK_SIZE, code_bytes)
        rows = (layout.anchor_rows, layout.anchor_row_bytes)
        return cls(
            sections.take(codes, torch.uint8, layout.code_section_bytes),
            sections.take(codes, torch.uint8, layout.code_section_bytes),
            sections.take(rows, torch.uint8, layout.anchor_section_bytes),
            sections.take(rows, torch.uint8, layout.anchor_section_bytes),
            sections.take((2, layout.anchor_rows), torch.int16, layout.offset_section_bytes),
        )

    @staticmethod
    def as_exact_rows(anchors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`k_anchors` or `v_anchors` as rows of the model's `dtype`.

        Returns (num_pages, num_kv_heads, anchor_rows // 2, head_size), a view.
        """
        num_pairs = anchors.shape[2] // 2
        return anchors[:, :, : 2 * num_pairs].unflatten(2, (num_pairs, 2)).flatten(3).view(dtype)


@dataclass(frozen=True)
class RecencyPages:
    """Typed views of a layer's recency pages; writing to them writes the cache.

    k, v: (num_blocks, num_kv_heads, recency_block_size, head_size) model dtype, K after RoPE.
    scores: (num_blocks, num_kv_heads, score_slots * 2, recency_block_size) float32, Anchor Scores of K and of V so far,
        slot by slot.
    """

    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def view(cls, raw: torch.Tensor, layout: PageLayout, dtype: torch.dtype) -> "RecencyPages":
        """View raw pages, (num_blocks, num_kv_heads, 1, recency_page_bytes) uint8 or int8."""
        sections = _Sections(raw)
        size = layout.recency_block_size
        row_bytes = size * layout.row_bytes
        rows = (size, layout.head_size)
        return cls(
            sections.take(rows, dtype, row_bytes),
            sections.take(rows, dtype, row_bytes),
            sections.take((layout.score_slots * 2, size), torch.float32, layout.score_slots * 2 * 4 * size),
        )

    @property
    def score_slots(self) -> int:
        """See above: the most new tokens of a request that may be an answer's."""
        return self.scores.shape[2] // 2


class _Sections:
    """Cuts the content dimension of raw pages into typed sections, left to right."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._raw = raw.view(torch.uint8).squeeze(2)
        self._start = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, section_bytes: int) -> torch.Tensor:
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        content = self._raw[:, :, self._start : self._start + num_bytes]
        self._start += section_bytes
        return content.view(dtype).unflatten(-1, shape)
