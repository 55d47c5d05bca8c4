"""What vLLM's own code says of capacity: at least 12 times as many tokens as `auto` at 1 bit, everything counted."""

import json
from pathlib import Path

import pytest
import torch

from tests.serving.conftest import EMBEDDED
from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.config import AntKVConfig
from vllm_antkv.presets import PRESETS

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
MAX_MODEL_LEN = 32768
MEMORY = 40 << 30


@pytest.fixture(params=["embedded", "llama-3-8b"])
def model_folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config; vLLM needs no weights to compute capacity."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    if request.param == "embedded":
        return EMBEDDED
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return tmp_path


def capacity(model: Path, preset: str | None, settings: AntKVConfig) -> int:
    """KV tokens that fit into MEMORY, as vLLM reports them at start-up; `auto` where `preset` is None."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.utils import record_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import (
        get_kv_cache_capacity,
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

    from vllm_antkv.cache.specs import recency_spec, vq_spec

    vllm_config = EngineArgs(
        model=str(model), tokenizer=str(EMBEDDED), max_model_len=MAX_MODEL_LEN, prefix_cache_retention_interval=1024
    ).create_engine_config()
    model_config = vllm_config.model_config
    num_kv_heads = model_config.get_num_kv_heads(vllm_config.parallel_config)
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(model_config.get_num_layers(vllm_config.parallel_config)):
        if preset is None:
            specs[f"layers.{layer}"] = FullAttentionSpec(
                block_size=128,
                num_kv_heads=num_kv_heads,
                head_size=model_config.get_head_size(),
                dtype=model_config.dtype,
            )
            continue
        layout = PageLayout.of(settings, PRESETS[preset], model_config.get_head_size(), model_config.dtype)
        specs[f"layers.{layer}"] = vq_spec(layout, num_kv_heads)
        specs[f"layers.{layer}.antkv_recent"] = recency_spec(layout, num_kv_heads, settings, vllm_config)
    record_kv_cache_layout(vllm_config.cache_config, "LBHNC" if preset is None else "BLHNC")
    groups = get_kv_cache_groups(vllm_config, specs)
    return get_kv_cache_capacity(vllm_config, get_kv_cache_config_from_groups(vllm_config, groups, MEMORY))[0]


def test_one_bit_holds_twelve_times_as_many_tokens_as_auto(model_folder: Path) -> None:
    settings = AntKVConfig()
    assert capacity(model_folder, "antkv-1bit", settings) >= 12 * capacity(model_folder, None, settings)


def test_every_preset_holds_more_than_the_one_with_more_bits(model_folder: Path) -> None:
    capacities = [capacity(model_folder, preset, AntKVConfig()) for preset in PRESETS]
    assert capacities == sorted(capacities)
    assert len(set(capacities)) == len(capacities)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_effective_bits_are_the_sum_of_their_parts(preset) -> None:
    layout = PageLayout.of(AntKVConfig(), preset, 128, torch.bfloat16)
    cost = footprint(layout, AntKVConfig(), 8192)
    assert cost.bits(cost.codes) == preset.nominal_bits
    assert cost.padding >= 0
    assert cost.total == cost.codes + cost.anchors + cost.recency + cost.padding


def test_one_bit_costs_at_most_one_and_a_half_effective_bits_at_8192_tokens() -> None:
    for head_size in (64, 128):
        layout = PageLayout.of(AntKVConfig(), PRESETS["antkv-1bit"], head_size, torch.bfloat16)
        cost = footprint(layout, AntKVConfig(), 8192)
        assert cost.bits(cost.total) <= 1.5
