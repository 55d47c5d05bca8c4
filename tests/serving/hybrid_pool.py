"""What a request takes of the pool in models of which some layers keep a state, as vLLM itself plans it."""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from vllm_antkv.cache.pages import page_layouts
from vllm_antkv.config import AntKVConfig
from vllm_antkv.layer_windows import has_mamba2, layer_windows, num_state_layers
from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.block_pool.specs import recency_spec, vq_spec
from vllm_antkv.vllm_adapter.hooks.groups import kv_cache_planning
from vllm_antkv.vllm_adapter.plan.blocks import make_blocks, set_block_size, states_of

_POOL = 1 << 42


class Pool(NamedTuple):
    """What one request takes.

    num_groups: of layers, each with a block table.
    total: bytes of all its blocks.
    wasted: share of them that holds no page.
    """

    num_groups: int
    total: int
    wasted: float


def measure(shape: dict[str, Any], preset: str, length: int) -> Pool:
    """Of a server for requests of so many tokens."""

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        config = EngineArgs(
            model=folder, skip_tokenizer_init=True, max_model_len=length, enable_prefix_caching=True
        ).create_engine_config()
    # As the model has them. On CPUs, vLLM keeps some twice as large.
    config.cache_config.mamba_ssm_cache_dtype = shape.get("mamba_ssm_dtype", "auto")
    specs, state, padding = _coded(config, preset)
    text_config = config.model_config.hf_text_config
    layers: dict[str, KVCacheSpec] = {f"layers.{layer}.state": state for layer in range(num_state_layers(text_config))}
    for name, spec in specs.items():
        layers |= {f"layers.{layer}.{name}": spec for layer in range(len(layer_windows(text_config)))}
    record_kv_cache_layout(config.cache_config, "BLHNC")
    planning = kv_cache_planning()
    groups = planning.get_kv_cache_groups(config, layers)
    block = _POOL // planning.get_kv_cache_config_from_groups(config, groups, _POOL).num_blocks
    total = held = 0
    for group in groups:
        spec = group.kv_cache_spec
        num_blocks = -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        total += num_blocks * block
        held += num_blocks * sum(layers[name].real_page_size_bytes for name in group.layer_names)
        held -= num_blocks * padding * sum(name.endswith(".attention") for name in group.layer_names)
    return Pool(len(groups), total, 1 - held / total)


def _coded(config: VllmConfig, preset: str) -> tuple[dict[str, KVCacheSpec], MambaSpec, int]:
    """Pages of an attention layer with codes and of a state, and bytes of the former that hold nothing."""
    settings, model_config = AntKVConfig(), config.model_config
    presets = [PRESETS[preset]] * len(layer_windows(model_config.hf_text_config))
    blocks = make_blocks(config, settings, presets, (), states_of(config))
    set_block_size(config, blocks)
    layout = page_layouts(settings, presets, model_config.get_head_size(), model_config.dtype, plan=blocks)[0]
    num_kv_heads = model_config.get_num_kv_heads(config.parallel_config)
    recent = recency_spec(layout, num_kv_heads, settings, config)
    padding = num_kv_heads * layout.num_pages * layout.padding
    return {"attention": vq_spec(layout, num_kv_heads), "antkv_recent": recent}, _state(config), padding


def _state(config: VllmConfig) -> MambaSpec:
    model_config = config.model_config
    model_class, _ = ModelRegistry.resolve_model_cls(model_config.architecture, model_config=model_config)
    return MambaSpec(
        shapes=model_class.get_mamba_state_shape_from_config(config),
        dtypes=model_class.get_mamba_state_dtype_from_config(config),
        block_size=config.cache_config.mamba_block_size,
        mamba_cache_mode="align",
        # Mamba-2 has a block more for a prompt that is being read.
        num_prefill_checkpoint_blocks=int(has_mamba2(model_config.hf_text_config)),
    )
