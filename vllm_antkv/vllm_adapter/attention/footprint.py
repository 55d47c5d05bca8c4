"""What the engine says of its own footprint at start-up and in its status."""

from collections.abc import Sequence
from dataclasses import replace

from vllm.config import VllmConfig

from vllm_antkv.cache.footprint import Footprint, footprint
from vllm_antkv.cache.pages import PageLayout, page_layouts, pool_block_bytes
from vllm_antkv.cache.pool_blocks import BlockPlan
from vllm_antkv.cache.positions import POSITION_PAGE_BYTES
from vllm_antkv.config import AntKVConfig
from vllm_antkv.features import num_sharing_layers
from vllm_antkv.layer_windows import attention_layers, layer_windows
from vllm_antkv.presets import Preset, nominal_bits
from vllm_antkv.vllm_adapter.attention.blocks import block_plan, states_of

#: Where codes make a request smaller by less, a cache of more bits hardly makes it larger.
_WORTH_CODES = 1.5


def served_layouts(
    vllm_config: VllmConfig, settings: AntKVConfig, presets: Sequence[Preset], exact: Sequence[int], plan: BlockPlan
) -> list[PageLayout]:
    """Layouts of the pages of the layers with codes, in blocks of this plan; others as in `served_footprint`."""
    _, of_exact = _windows(vllm_config, exact)
    model_config = vllm_config.model_config
    return page_layouts(
        settings,
        presets,
        model_config.get_head_size(),
        model_config.dtype,
        plan=replace(plan, num_exact=of_exact.count(None)),
    )


def served_footprint(
    vllm_config: VllmConfig, settings: AntKVConfig, presets: Sequence[Preset], exact: Sequence[int]
) -> tuple[list[PageLayout], Footprint]:
    """Layouts of the layers' pages, and the cost of 8192 tokens, or of the longest length if that is shorter.

    presets: of the layers that have codes.
    exact: indices of the decoder layers that stay exact.
    """
    layouts = served_layouts(vllm_config, settings, presets, exact, block_plan(vllm_config))
    length = min(8192, vllm_config.model_config.max_model_len)
    return layouts, footprint(layouts, settings, length, *_windows(vllm_config, exact), position_bytes(vllm_config))


def outgrown_windows(vllm_config: VllmConfig) -> list[int | None]:
    """As `layer_windows`, where a window that no request outgrows is none."""
    model_config = vllm_config.model_config
    return layer_windows(model_config.hf_text_config, model_config.max_model_len)


def _windows(vllm_config: VllmConfig, exact: Sequence[int]) -> tuple[list[int | None], list[int | None]]:
    """Of the layers with codes, and of those that stay exact."""
    text_config = vllm_config.model_config.hf_text_config
    windows = outgrown_windows(vllm_config)
    indices = attention_layers(text_config) or range(len(windows))
    # The last ones may have no pages of their own.
    windows = windows[: len(windows) - num_sharing_layers(text_config)]
    kinds = [(index in exact, window) for index, window in zip(indices, windows, strict=False)]
    coded, of_exact = ([window for is_exact, window in kinds if is_exact is kind] for kind in (False, True))
    return coded, of_exact


def position_bytes(vllm_config: VllmConfig) -> int:
    """A KV head's share of a page of positions, which models with M-RoPE have."""
    model_config = vllm_config.model_config
    if not model_config.uses_mrope:
        return 0
    return -(-POSITION_PAGE_BYTES // model_config.get_num_kv_heads(vllm_config.parallel_config))


def describe(
    vllm_config: VllmConfig, settings: AntKVConfig, presets: Sequence[Preset], exact: Sequence[int]
) -> list[str]:
    """Lines for the log: nominal and effective bits, with their parts, and what drafts and states add to a request.

    Arguments as in `served_footprint`.
    """
    layouts, cost = served_footprint(vllm_config, settings, presets, exact)
    of_exact = f" + exact layers {cost.bits(cost.exact):.3f}" if cost.exact else ""
    name, model_config = vllm_config.cache_config.cache_dtype, vllm_config.model_config
    lines = [
        f"{name}: {nominal_bits(presets):.4g} nominal bits per element, {cost.bits(cost.total):.3f} effective at "
        f"{cost.length} tokens = codes {cost.bits(cost.codes):.3f} + anchors {cost.bits(cost.anchors):.3f} + recent "
        f"and prefix rows {cost.bits(cost.recency):.3f}{of_exact} + padding {cost.bits(cost.padding):.3f} "
        f"({8 * model_config.dtype.itemsize} bits with auto)"
    ]
    if of_draft := block_plan(vllm_config).draft_bytes:
        of_codes = sum(layout.vq_page_bytes for layout in layouts)
        lines.append(f"What drafts is not coded: its cache takes {of_draft / of_codes:.1f} times what the codes take.")
    states = states_of(vllm_config)
    if states is not None:
        of_states = states.request_bytes(pool_block_bytes(layouts))
        of_auto = cost.elements * model_config.dtype.itemsize + states.all_bytes
        gain = of_auto / (cost.total + of_states)
        lines.append(
            f"Layers with a state take {of_states / (cost.total + of_states):.0%} of a request of {cost.length} tokens "
            f"and are not coded: it takes {gain:.1f} times less than with auto, in blocks of "
            f"{block_plan(vllm_config).num_tokens} tokens."
        )
        if gain < _WORTH_CODES:
            lines.append("For requests this short, take a preset of more bits, or fp8: they take hardly more.")
    return lines
