"""What the engine says of its own footprint at start-up and in its status."""

from collections.abc import Sequence

from vllm.config import VllmConfig

from vllm_antkv.cache.footprint import Footprint, footprint
from vllm_antkv.cache.pages import PageLayout, page_layouts
from vllm_antkv.config import AntKVConfig
from vllm_antkv.presets import Preset, nominal_bits


def served_footprint(
    vllm_config: VllmConfig,
    settings: AntKVConfig,
    presets: Sequence[Preset],
    windows: Sequence[int | None],
    num_exact: int,
) -> tuple[list[PageLayout], Footprint]:
    """Layouts of the layers' pages, and the cost of 8192 tokens, or of the longest length if that is shorter.

    presets, windows: of the layers that have codes; None for one without a window.
    num_exact: layers that stay exact.
    """
    model_config = vllm_config.model_config
    all_slide = not num_exact and None not in windows
    layouts = page_layouts(settings, presets, model_config.get_head_size(), model_config.dtype, all_slide, num_exact)
    return layouts, footprint(layouts, settings, min(8192, model_config.max_model_len), windows, num_exact)


def describe(
    vllm_config: VllmConfig,
    settings: AntKVConfig,
    presets: Sequence[Preset],
    windows: Sequence[int | None],
    num_exact: int,
) -> list[str]:
    """Lines for the log: nominal and effective bits, with their parts; arguments as in `served_footprint`."""
    _, cost = served_footprint(vllm_config, settings, presets, windows, num_exact)
    exact = f" + exact layers {cost.bits(cost.exact):.3f}" if num_exact else ""
    name, model_config = vllm_config.cache_config.cache_dtype, vllm_config.model_config
    return [
        f"{name}: {nominal_bits(presets):.4g} nominal bits per element, {cost.bits(cost.total):.3f} effective at "
        f"{cost.length} tokens = codes {cost.bits(cost.codes):.3f} + anchors {cost.bits(cost.anchors):.3f} + recent "
        f"and prefix rows {cost.bits(cost.recency):.3f}{exact} + padding {cost.bits(cost.padding):.3f} "
        f"({8 * model_config.dtype.itemsize} bits with auto)"
    ]
