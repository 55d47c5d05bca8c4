"""KV cache specs for vLLM, one per page class."""

from dataclasses import dataclass, field, replace

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.cache.positions import POSITION_PAGE_BYTES
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.select.retention import PageRetention, page_retention

#: Tokens per page of an unquantised layer with a window: few fit into a block made for codes.
_WINDOW_BLOCK_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class RecencySpec(SlidingWindowSpec):
    """Recency pages: allocated for tokens that are still read unquantised, and freed afterwards.

    Derived from SlidingWindowSpec, because vLLM accepts a retention interval and bounds a request's reservation for its
    own specs only. `retention` alone decides which pages live: everything the parent says about that is overridden
    (tests/serving/test_recency_spec.py has the list), and the parent's window is the longest sequence, so that nothing
    is ever below it.

    settings: the user's settings, which decide the retention.
    window: tokens that a query sees in these layers, itself included; None: all before it.
    max_len: longest sequence served.
    interval: tokens between prefix-cache boundaries that stay reachable.
    max_steps: engine steps in flight at once, 2 with async scheduling.
    vq_block_size: tokens of a block of VQ pages.
    unsettled: tokens at the end of a step that may be rejected, or are not computed yet (speculative decoding).
    dropped: tokens that vLLM takes off a prefix-cache hit (EAGLE).
    """

    settings: AntKVConfig
    max_len: int
    interval: int
    max_steps: int
    window: int | None = None
    vq_block_size: int = VQ_BLOCK_SIZE
    unsettled: int = 0
    dropped: int = 0

    sliding_window: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Not an assertion: `python -O` would drop it, and the first pages would be freed.
        if self.extra_retained_tokens:
            raise ValueError("recency pages retain no extra tokens: MTP with several layers is refused at start-up")
        object.__setattr__(self, "sliding_window", self.max_len)

    @property
    def num_retained_tokens(self) -> int:
        """0, so that vLLM 0.33's worker nulls no page: the first pages of a sequence stay."""
        return 0

    @property
    def retention(self) -> PageRetention:
        """When pages live and die."""
        sizes = (self.max_len, self.block_size, self.interval, self.window, self.vq_block_size)
        return replace(page_retention(self.settings, *sizes), unsettled=self.unsettled, dropped=self.dropped)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """The most pages a request holds at once; vLLM admits requests and sizes the pool by it."""
        return self.retention.max_pages(max_model_len, max_in_flight_tokens, self.max_steps)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Recency pages of all layers with one window share a block table, but never one with other pages."""
        specs = kv_cache_specs.values()
        return all(isinstance(spec, RecencySpec) and spec.window == self.window for spec in specs)


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """VQ pages of a layer with a window, which vLLM frees as its own: once no later query sees a token of the block."""

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """VLLM would lose some layers of several sizes; `groups.regrouped` puts them together."""
        return all(spec == self for spec in kv_cache_specs.values())


def vq_spec(layout: PageLayout, num_kv_heads: int, window: int | None = None) -> FullAttentionSpec | WindowSpec:
    """The spec of VQ pages: one opaque state per block and KV head, of all its pages.

    uint8 with `state_content_bytes`, so that vLLM does not zero new blocks; kernels reset what needs it.
    """
    block_size = layout.num_pages * VQ_BLOCK_SIZE
    page = {
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_size": layout.head_size,
        "dtype": torch.uint8,
        "state_content_bytes": layout.num_pages * layout.vq_page_bytes,
        "tokens_per_state": block_size,
    }
    if window is None:
        return FullAttentionSpec(**page)
    return WindowSpec(**page, sliding_window=window)


def position_spec(num_pages: int = 1) -> FullAttentionSpec:
    """The spec of position pages, which lie beside the VQ pages of all layers, on every rank; as many in a block."""
    return FullAttentionSpec(
        block_size=num_pages * VQ_BLOCK_SIZE,
        num_kv_heads=1,
        head_size=POSITION_PAGE_BYTES,
        dtype=torch.uint8,
        state_content_bytes=num_pages * POSITION_PAGE_BYTES,
        tokens_per_state=num_pages * VQ_BLOCK_SIZE,
    )


def exact_spec(
    num_kv_heads: int, head_size: int, dtype: torch.dtype, window: int | None = None
) -> FullAttentionSpec | SlidingWindowSpec:
    """The spec of vLLM's own pages of an unquantised layer; window: as above.

    Without a window, a page has the tokens of a VQ page and lies beside it. With one it must not: vLLM groups layers of
    one window and block size, and cannot always do so where pages differ in size.
    """
    page = {"num_kv_heads": num_kv_heads, "head_size": head_size, "dtype": dtype}
    if window is None:
        return FullAttentionSpec(**page, block_size=VQ_BLOCK_SIZE)
    return SlidingWindowSpec(**page, block_size=_WINDOW_BLOCK_SIZE, sliding_window=window)


def recency_spec(
    layout: PageLayout, num_kv_heads: int, settings: AntKVConfig, vllm_config: VllmConfig, window: int | None = None
) -> RecencySpec:
    """The spec of recency pages of a layer; window: as in `RecencySpec`."""
    interval = vllm_config.cache_config.prefix_cache_retention_interval
    speculative = vllm_config.speculative_config
    vq_block_size = layout.num_pages * VQ_BLOCK_SIZE
    max_steps = max(vllm_config.max_in_flight_tokens // vllm_config.scheduler_config.max_num_batched_tokens, 1)
    return RecencySpec(
        block_size=layout.recency_block_size,
        num_kv_heads=num_kv_heads,
        head_size=layout.head_size,
        dtype=torch.uint8,
        state_content_bytes=layout.recency_page_bytes,
        tokens_per_state=layout.recency_block_size,
        dcp_sharded=False,
        settings=settings,
        max_len=vllm_config.model_config.max_model_len,
        # None is vLLM's dense retention: every boundary at which a hit can end.
        interval=vq_block_size if interval is None else interval,
        window=window,
        vq_block_size=vq_block_size,
        max_steps=max_steps,
        unsettled=max_steps * vllm_config.num_speculative_tokens + vllm_config.num_lookahead_tokens,
        dropped=vq_block_size if speculative is not None and speculative.use_eagle_block_drop() else 0,
    )
