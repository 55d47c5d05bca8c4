"""What the engine says of its own footprint at start-up and in its status."""

from collections.abc import Sequence

from vllm.config import VllmConfig

from vllm_antkv.cache.footprint import Footprint, footprint
from vllm_antkv.cache.pages import PageLayout, page_layouts
from vllm_antkv.config import AntKVConfig
from vllm_antkv.layer_windows import layer_windows
from vllm_antkv.presets import Preset, nominal_bits


def served_footprint(
    vllm_config: VllmConfig, settings: AntKVConfig, presets: Sequence[Preset]
) -> tuple[list[PageLayout], Footprint]:
    """Layouts of the layers' pages, and the cost of 8192 tokens, or of the longest length if that is shorter."""
    model_config = vllm_config.model_config
    windows = layer_windows(model_config.hf_text_config)
    layouts = page_layouts(
        settings, presets, model_config.get_head_size(), model_config.dtype, all_slide=None not in windows
    )
    return layouts, footprint(layouts, settings, min(8192, model_config.max_model_len), windows)


def describe(vllm_config: VllmConfig, settings: AntKVConfig, presets: Sequence[Preset]) -> list[str]:
    """Lines for the log: nominal and effective bits, with their parts."""
    _, cost = served_footprint(vllm_config, settings, presets)
    name, model_config = vllm_config.cache_config.cache_dtype, vllm_config.model_config
    return [
        f"{name}: {nominal_bits(presets):.4g} nominal bits per element, {cost.bits(cost.total):.3f} effective at "
        f"{cost.length} tokens = codes {cost.bits(cost.codes):.3f} + anchors {cost.bits(cost.anchors):.3f} + recent "
        f"and prefix rows {cost.bits(cost.recency):.3f} + padding {cost.bits(cost.padding):.3f} "
        f"({8 * model_config.dtype.itemsize} bits with auto)"
    ]
