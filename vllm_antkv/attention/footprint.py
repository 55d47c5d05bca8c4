"""What the engine says of its own footprint at start-up and in its status."""

from vllm.config import VllmConfig

from vllm_antkv.cache.footprint import Footprint, footprint
from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.config import AntKVConfig
from vllm_antkv.presets import get_preset


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
