"""Layers that `--kv-cache-dtype-skip-layers` names stay exact, in vLLM's own attention; the others are coded."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from scripts.capacity_figure import GEMMA_3_27B, LLAMA_3_8B, MEMORY, cache_config, engine_config
from tests.serving.conftest import PRESET, assert_all_same
from tests.serving.served_family import SINKS, assert_as_expected, evaluated, method_of
from tests.serving.tiny import GEMMA, GEMMA_3N, WINDOWS, make_coded
from vllm_antkv.cache.pages import page_layouts, pool_block_bytes
from vllm_antkv.cache.pool_blocks import BlockPlan
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.server.status import EngineStatus, Setup

LENGTHS = (5, 127, 128, 300, 431)
PROMPTS = [[0, *range(3 + i, 2 + i + length)] for i, length in enumerate(LENGTHS)]
#: Every second layer with a window.
WITH_WINDOWS = GEMMA | {"num_hidden_layers": 4, "layer_types": 2 * WINDOWS, "attn_logit_softcapping": 1.0}
#: Model type and config, layers that are named, layers that are then exact.
CASES: dict[str, tuple[str, dict[str, Any], list[str], set[int]]] = {
    "first and last": ("llama", {"num_hidden_layers": 4}, ["0", "3"], {0, 3}),
    "with and without a window": ("gemma2", WITH_WINDOWS, ["1", "2"], {1, 2}),
    "one that is read, and its reader": ("gemma3n_text", GEMMA_3N, ["1", "3"], {1, 3}),
    "all with a window": ("gemma2", WITH_WINDOWS, ["sliding_window"], {0, 2}),
}


class ExceptIn:
    """A quantiser that gives the rows of some layers back as they are."""

    def __init__(self, quantiser: Any, layers: set[int]) -> None:
        self._quantiser, self._layers = quantiser, layers

    def read_back(self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable) -> Any:
        if layer in self._layers:
            return key.clone(), value.clone()
        return self._quantiser.read_back(layer, key, value, rotary)


@pytest.mark.parametrize(("model_type", "changes", "named", "exact"), CASES.values(), ids=CASES.keys())
def test_layers_that_are_named_are_exact_and_others_coded(start_engine, tmp_path, model_type, changes, named, exact):
    model = make_coded(tmp_path / "model", model_type, changes, sinks=SINKS)
    options = {"max_model_len": 512, "max_num_batched_tokens": 200, "kv_cache_memory_bytes": 64 << 20}
    with start_engine(model, PRESET, kv_cache_dtype_skip_layers=named, **options) as engine:
        batched = engine.complete(PROMPTS, max_tokens=3)
        alone = engine.complete(PROMPTS, max_tokens=3, together=False)
        assert any(completion.num_cached_tokens for completion in alone)
        assert_all_same(batched, alone)
        engine.assert_all_blocks_free()
        assert EngineStatus.of(0, engine.core.antkv_status()).fallbacks == 0
        setup = Setup.of(engine.llm.llm_engine.vllm_config)
        assert sum(setup.bits.parts.values()) == pytest.approx(setup.bits.effective)
        assert ("exact" in setup.bits.parts) == (named != ["sliding_window"])
    card = ModelCard.read(str(model))
    method = method_of(card, PRESET)
    method = replace(method, quantiser=ExceptIn(method.quantiser, exact))
    assert_as_expected(batched, evaluated(card, method, PROMPTS))


def test_a_layer_is_not_skipped_without_the_one_that_reads_it(start_engine, tmp_path, refused):
    make_coded(tmp_path, "gemma3n_text", GEMMA_3N)
    options = {"max_model_len": 512, "kv_cache_dtype_skip_layers": ["1"]}
    words = "Layer 3 of this model reads the KV cache of layer 1: name both"
    with refused(UnsupportedModelError, words), start_engine(tmp_path, PRESET, **options):
        pass


@pytest.mark.parametrize("num_exact", [2, 4])
def test_pages_of_exact_layers_lie_beside_the_others_without_waste(tmp_path, num_exact):
    """First and last layers, as vLLM's own TurboQuant leaves them out, in the shape of Llama-3-8B."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    half = num_exact // 2
    presets = [None] * half + [PRESETS[PRESET]] * (32 - num_exact) + [None] * half
    found = cache_config(engine_config(str(tmp_path), 8192), presets)
    assert [len(group.layer_names) for group in found.kv_cache_groups] == [32, 32 - num_exact]
    layouts = page_layouts(AntKVConfig(), presets[half:-half], 128, torch.bfloat16, plan=BlockPlan(num_exact=num_exact))
    assert found.num_blocks == MEMORY // (8 * pool_block_bytes(layouts, num_exact))
    content = sum(layout.vq_page_bytes - layout.padding for layout in layouts) + num_exact * layouts[0].exact_page_bytes
    assert pool_block_bytes(layouts, num_exact) <= 1.01 * content


def test_no_layer_is_lost_where_layers_with_windows_are_exact(tmp_path):
    """vLLM cuts layers with windows into groups, in the shape of Gemma-3-27B too."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_27B))
    presets = [None, None, *[PRESETS[PRESET]] * 58, None, None]
    found = cache_config(engine_config(str(tmp_path), 8192), presets)
    names = [name for group in found.kv_cache_groups for name in group.layer_names]
    assert sorted(names) == sorted(
        {f"layers.{layer}" for layer in range(62)} | {f"layers.{layer}.antkv_recent" for layer in range(2, 60)}
    )
