"""What vLLM's own code says of capacity, everything counted. Beside `auto`: tests/house/test_docs.py."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from vllm import EngineArgs

from scripts.capacity_figure import GEMMA_3_27B, LLAMA_3_8B, MEMORY, cache_config, capacity, engine_config
from scripts.hybrid_figure import MODELS
from tests.serving.conftest import EMBEDDED
from tests.serving.hybrid_pool import measure
from tests.serving.tiny import LFM2, make_coded
from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import PageLayout, page_layouts, pool_block_bytes
from vllm_antkv.capacity.memory import DecodeShape, sequence_bytes, state_bytes
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.config import AntKVConfig
from vllm_antkv.layer_windows import num_state_layers, states_per_request
from vllm_antkv.presets import PRESETS

MAX_MODEL_LEN = 32768


@pytest.fixture(params=["embedded", "llama-3-8b"])
def model_folder(request, tmp_path, monkeypatch) -> Path:
    """A folder with a config; vLLM needs no weights to compute capacity."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    if request.param == "embedded":
        return EMBEDDED
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return tmp_path


@pytest.mark.parametrize("num_layers", [2, 8, 9])
def test_layers_with_windows_alone_share_one_block_table_for_either_class_of_pages(tmp_path, num_layers):
    kinds = ["sliding_attention"] * num_layers
    sizes = {"num_hidden_layers": num_layers, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_27B | sizes))
    found = cache_config(engine_config(str(tmp_path), 8192), [PRESETS["antkv-1bit"]] * num_layers)
    assert [len(group.layer_names) for group in found.kv_cache_groups] == [num_layers, num_layers]


@pytest.mark.parametrize(
    "counts",
    [(3, 0, 29, 0, 0, 0), (0, 8, 0, 4, 0, 20), (0, 7, 6, 0, 19, 0), (0, 8, 8, 8, 0, 8), (1, 1, 1, 1, 1, 27), None],
    ids=str,
)
def test_mixed_layers_share_one_block_table_for_either_class_of_pages(model_folder, counts):
    """Also where layers of several presets are there equally often, which vLLM would take for a pattern."""
    config = engine_config(str(model_folder), MAX_MODEL_LEN)
    num_layers = config.model_config.get_num_layers(config.parallel_config)
    if counts is None:
        # Every size once, as far as there are presets.
        presets = (list(PRESETS.values()) * num_layers)[:num_layers]
    else:
        ordered = [preset for preset, count in zip(PRESETS.values(), counts, strict=True) for _ in range(count)]
        presets = random.Random(0).sample(ordered, num_layers)
    found = cache_config(config, presets)
    assert [len(group.layer_names) for group in found.kv_cache_groups] == [num_layers, num_layers]
    layouts = page_layouts(AntKVConfig(), presets, config.model_config.get_head_size(), config.model_config.dtype)
    num_kv_heads = config.model_config.get_num_kv_heads(config.parallel_config)
    assert found.num_blocks == MEMORY // (num_kv_heads * pool_block_bytes(layouts))


@pytest.mark.parametrize("cache", ["auto", *PRESETS])
def test_what_antkv_plan_computes_fills_the_blocks_that_vllm_has(model_folder, cache):
    config = engine_config(str(model_folder), MAX_MODEL_LEN)
    shape = DecodeShape.of(config.model_config.hf_config)
    presets = None if cache == "auto" else [PRESETS[cache]] * shape.num_layers
    blocks = cache_config(config, presets).num_blocks
    planned = MEMORY / (shape.heads * sequence_bytes(shape, cache, MAX_MODEL_LEN))
    if presets is None:
        taken = MAX_MODEL_LEN // 128
    else:
        layout = PageLayout.of(AntKVConfig(), presets[0], shape.head_size, torch.bfloat16)
        taken = footprint([layout], AntKVConfig(), MAX_MODEL_LEN).total // pool_block_bytes([layout])
    assert int(planned) * taken <= blocks < (int(planned) + 1) * taken


@pytest.mark.parametrize("cache", ["auto", "antkv-2bit", "antkv-1bit"])
def test_what_antkv_plan_computes_with_windows_is_what_vllm_holds_and_a_little_more(tmp_path, cache):
    """vLLM's figure has a prompt's step in flight in every request, and layers without content that fill up groups."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_27B))
    longest = 131072
    shape = DecodeShape.of(AutoConfig.from_pretrained(tmp_path))
    planned = longest * MEMORY / (shape.heads * sequence_bytes(shape, cache, longest))
    held = capacity(str(tmp_path), None if cache == "auto" else cache, longest)
    assert held <= planned <= 1.3 * held


@pytest.mark.parametrize("name", MODELS)
def test_states_waste_less_than_a_tenth_of_what_a_request_takes(tmp_path, name):
    """And `antkv plan` computes what vLLM has, without pages for a step in flight."""
    shape = MODELS[name]
    pool = measure(shape, "antkv-1bit", MAX_MODEL_LEN)
    assert pool.wasted < 0.1
    assert pool.num_groups <= 40
    config = AutoConfig.for_model(**{key: value for key, value in shape.items() if key != "architectures"})
    identity = ModelIdentity.from_hf_config(config)
    states = num_state_layers(config), state_bytes(config), states_per_request(config)
    planned = DecodeShape(identity.num_layers, identity.num_kv_heads, identity.head_size, 0, 0, (), *states)
    total = planned.heads * sequence_bytes(planned, "antkv-1bit", MAX_MODEL_LEN)
    assert 0.85 * pool.total <= total <= 1.01 * pool.total


@pytest.mark.parametrize("window", [300, 1024])
def test_layers_with_windows_cost_no_more_however_long_a_sequence_is(window):
    layout = PageLayout.of(AntKVConfig(), PRESETS["antkv-1bit"], 128, torch.bfloat16)
    costs = [footprint([layout], AntKVConfig(), length, [window]) for length in (4096, 65536)]
    assert costs[0].total == costs[1].total
    assert costs[0].elements == costs[1].elements == 2 * window * 128
    short = footprint([layout], AntKVConfig(), window, [window])
    assert short == footprint([layout], AntKVConfig(), window)
    both = footprint([layout, layout], AntKVConfig(), 4096, [window, None])
    assert both.total == costs[0].total + footprint([layout], AntKVConfig(), 4096).total
    assert both.total == both.codes + both.anchors + both.recency + both.padding


def test_one_bit_costs_at_most_one_and_a_half_effective_bits_at_8192_tokens():
    for head_size in (64, 128):
        layout = PageLayout.of(AntKVConfig(), PRESETS["antkv-1bit"], head_size, torch.bfloat16)
        cost = footprint([layout], AntKVConfig(), 8192)
        assert cost.bits(cost.total) <= 1.5


def test_the_log_says_what_states_take_and_where_codes_gain_little(tmp_path, said):
    large = make_coded(tmp_path, "lfm2", LFM2 | {"conv_L_cache": 513})
    EngineArgs(model=str(large), kv_cache_dtype="antkv-1bit", max_model_len=512).create_engine_config()
    said_of_states = [line for line in said if line.startswith("Layers with a state take ")]
    assert len(said_of_states) == 1
    assert any("take a preset of more bits, or fp8" in line for line in said)
