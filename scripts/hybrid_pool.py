"""How much of the pool models with state-space or linear-attention layers would waste, as vLLM plans it.

`python scripts/hybrid_pool.py` prints the table of docs/compatibility.md. No weights and no GPU are needed. All numbers
are of vLLM's own planning, for one request of LENGTH tokens.
"""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

LENGTH = 32768
PRESET = "antkv-1bit"
_COMMON = {"vocab_size": 128256, "max_position_embeddings": 131072, "dtype": "bfloat16"}
#: Layers with attention, and with a state, by architecture.
LAYERS = {"Qwen3NextForCausalLM": (12, 36), "GraniteMoeHybridForCausalLM": (4, 36), "FalconH1ForCausalLM": (72, 72)}
_POOL = 1 << 40
#: The shapes of published models.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    },
    "Granite-4.0-H-Small": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 4096,
        "intermediate_size": 768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "Falcon-H1-34B": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hidden_size": 5120,
        "intermediate_size": 21504,
        "num_hidden_layers": 72,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "mamba_d_ssm": 4096,
        "mamba_n_heads": 32,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
    },
}


class Pool(NamedTuple):
    """What one request takes.

    state: bytes of the state of one layer that has no attention.
    block: bytes of a block of the pool.
    total: bytes of all its blocks.
    wasted: share of them that hold nothing.
    """

    state: int
    block: int
    total: int
    wasted: float


def measure(shape: dict[str, Any], preset: str | None) -> Pool:
    """Of a model of this shape, with an antkv cache, or with `auto` for None."""
    from vllm.v1.attention.backends.utils import record_kv_cache_layout

    from scripts.capacity_figure import engine_config
    from scripts.moved import kv_cache_planning

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_COMMON | shape))
        config = engine_config(folder, LENGTH)
        # As the model has them. On CPUs, vLLM keeps some twice as large.
        config.cache_config.mamba_ssm_cache_dtype = "auto"
        attention, state = _specs_of_auto(config) if preset is None else _specs(config, preset)
    num_attention, num_states = LAYERS[shape["architectures"][0]]
    specs: dict[str, KVCacheSpec] = {f"layers.{layer}.state": state for layer in range(num_states)}
    for name, spec in attention.items():
        specs |= {f"layers.{layer}.{name}": spec for layer in range(num_attention)}
    record_kv_cache_layout(config.cache_config, "LBHNC" if preset is None else "BLHNC")
    planning = kv_cache_planning()
    groups = planning.get_kv_cache_groups(config, specs)
    block = _POOL // planning.get_kv_cache_config_from_groups(config, groups, _POOL).num_blocks
    total = held = 0
    for group in groups:
        spec = group.kv_cache_spec
        num_blocks = -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        total += num_blocks * block
        held += num_blocks * sum(specs[name].real_page_size_bytes for name in group.layer_names)
    return Pool(state.real_page_size_bytes, block, total, 1 - held / total)


def _specs_of_auto(config: "VllmConfig") -> "tuple[dict[str, KVCacheSpec], MambaSpec]":
    """Pages of an attention layer and of a state: vLLM makes blocks so long that one is as large as the other."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    current_platform._align_hybrid_block_size(config, CPUAttentionBackend)
    model_config, cache_config = config.model_config, config.cache_config
    spec = FullAttentionSpec(
        block_size=cache_config.block_size,
        num_kv_heads=model_config.get_num_kv_heads(config.parallel_config),
        head_size=model_config.get_head_size(),
        dtype=model_config.dtype,
    )
    return {"attention": spec}, replace(_state(config), page_size_padded=spec.page_size_bytes)


def _specs(config: "VllmConfig", preset: str) -> "tuple[dict[str, KVCacheSpec], MambaSpec]":
    """Pages of an attention layer with codes, and of a state, as they are."""
    from vllm_antkv.cache.pages import page_layouts
    from vllm_antkv.cache.specs import recency_spec, vq_spec
    from vllm_antkv.config import AntKVConfig
    from vllm_antkv.presets import PRESETS

    model_config, settings = config.model_config, AntKVConfig()
    num_layers, _ = LAYERS[model_config.architecture]
    num_kv_heads, head_size = model_config.get_num_kv_heads(config.parallel_config), model_config.get_head_size()
    layout = page_layouts(settings, [PRESETS[preset]] * num_layers, head_size, model_config.dtype)[0]
    pages = {
        "attention": vq_spec(layout, num_kv_heads),
        "antkv_recent": recency_spec(layout, num_kv_heads, settings, config),
    }
    return pages, _state(config)


def _state(config: "VllmConfig") -> "MambaSpec":
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.kv_cache_interface import MambaSpec

    model_class, _ = ModelRegistry.resolve_model_cls(config.model_config.architecture, model_config=config.model_config)
    return MambaSpec(
        shapes=model_class.get_mamba_state_shape_from_config(config),
        dtypes=model_class.get_mamba_state_dtype_from_config(config),
        block_size=LENGTH,
    )


def main() -> None:
    """The command."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    print("| model | state of a layer | block | wasted | a request | wasted by `auto` | a request with `auto` |")
    print("|---|---|---|---|---|---|---|")
    for name, shape in MODELS.items():
        coded, auto = measure(shape, PRESET), measure(shape, None)
        cells = (
            name,
            f"{coded.state / 2**20:.2f} MiB",
            f"{coded.block / 2**20:.2f} MiB",
            f"{coded.wasted:.0%}",
            f"{coded.total / 2**20:.0f} MiB",
            f"{auto.wasted:.0%}",
            f"{auto.total / 2**20:.0f} MiB",
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
