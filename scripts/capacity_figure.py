"""How many tokens a cache holds relative to `auto`, as vLLM itself computes it.

`python -m scripts.capacity_figure` writes docs/figures/capacity.json, and `python -m research.figures.capacity` draws
it. No weights and no GPU are needed.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_antkv.presets import Preset

NUMBERS = Path(__file__).parent.parent / "docs" / "figures" / "capacity.json"
#: `--max-model-len`: the longest request that vLLM has to be able to hold.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
#: Memory of the cache; ratios do not depend on it as long as it is large.
MEMORY = 40 << 30
#: The shape of Llama-3-8B.
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
#: The shape of Gemma-3-27B's language model: windows of 1024 tokens in five of six layers.
GEMMA_3_27B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


def measure(shape: dict[str, Any]) -> dict[str, list[float]]:
    """For each preset and each of LENGTHS, tokens held divided by those of `auto`, by a model of this config."""
    from vllm_antkv.presets import PRESETS

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        auto = [capacity(folder, None, length) for length in LENGTHS]
        return {
            name: [round(capacity(folder, name, length) / base, 2) for length, base in zip(LENGTHS, auto, strict=True)]
            for name in PRESETS
        }


def capacity(model: str, preset: str | None, max_model_len: int) -> int:
    """KV tokens in MEMORY for requests of at most this length, as vLLM reports them at start-up; of `auto` for None."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    from vllm_antkv.presets import PRESETS

    config = engine_config(model, max_model_len)
    num_layers = config.model_config.get_num_layers(config.parallel_config)
    presets = None if preset is None else [PRESETS[preset]] * num_layers
    return int(get_kv_cache_capacity(config, cache_config(config, presets))[0])


def engine_config(model: str, max_model_len: int) -> "VllmConfig":
    """The configuration of vLLM for a model without weights."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model, skip_tokenizer_init=True, max_model_len=max_model_len, prefix_cache_retention_interval=1024
    ).create_engine_config()


def cache_config(config: "VllmConfig", presets: "Sequence[Preset | None] | None") -> "KVCacheConfig":
    """How vLLM divides MEMORY among layers of these presets, None where a layer stays exact, or of `auto`."""
    from vllm.v1.attention.backends.utils import record_kv_cache_layout
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

    from vllm_antkv.cache.pages import page_layouts
    from vllm_antkv.cache.pool_blocks import BlockPlan
    from vllm_antkv.config import AntKVConfig
    from vllm_antkv.layer_windows import layer_windows
    from vllm_antkv.vllm_adapter.block_pool.specs import exact_spec, recency_spec, vq_spec
    from vllm_antkv.vllm_adapter.hooks.groups import kv_cache_planning

    model_config, settings = config.model_config, AntKVConfig()
    num_kv_heads, head_size = model_config.get_num_kv_heads(config.parallel_config), model_config.get_head_size()
    windows = layer_windows(model_config.hf_text_config, model_config.max_model_len)
    specs: dict[str, KVCacheSpec] = {}
    if presets is None:
        page = {"block_size": 128, "num_kv_heads": num_kv_heads, "head_size": head_size, "dtype": model_config.dtype}
        for layer, window in enumerate(windows):
            kind = FullAttentionSpec(**page) if window is None else SlidingWindowSpec(**page, sliding_window=window)
            specs[f"layers.{layer}"] = kind
    else:
        coded = [preset for preset in presets if preset is not None]
        num_exact = sum(preset is None and window is None for preset, window in zip(presets, windows, strict=True))
        plan = BlockPlan(num_exact=num_exact)
        layouts = iter(page_layouts(settings, coded, head_size, model_config.dtype, plan))
        for layer, (preset, window) in enumerate(zip(presets, windows, strict=True)):
            if preset is None:
                specs[f"layers.{layer}"] = exact_spec(num_kv_heads, head_size, model_config.dtype, window)
                continue
            layout = next(layouts)
            specs[f"layers.{layer}"] = vq_spec(layout, num_kv_heads, window)
            specs[f"layers.{layer}.antkv_recent"] = recency_spec(layout, num_kv_heads, settings, config, window)
    record_kv_cache_layout(config.cache_config, "LBHNC" if presets is None else "BLHNC")
    planning = kv_cache_planning()
    return planning.get_kv_cache_config_from_groups(config, planning.get_kv_cache_groups(config, specs), MEMORY)


def main() -> None:
    """The command."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    numbers = {"lengths": LENGTHS, "relative to auto": measure(LLAMA_3_8B), "Gemma-3-27B": measure(GEMMA_3_27B)}
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
