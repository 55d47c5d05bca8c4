"""What `AntKVStore` keeps: little more than the pool holds, and no more than its limit."""

import shutil
from pathlib import Path

import pytest

from tests.serving.conftest import EMBEDDED, Engine, assert_same, transfer
from tests.serving.test_page_store import PRESET
from tests.serving.tiny import make_coded
from vllm_antkv.vllm_adapter.block_pool.managers import pages_in_use

NUM_TOKENS = 8192
#: Of real layers.
SHAPES = {
    "SmolLM2": {"hidden_size": 192, "head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 3},
    "Llama-3-8B": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 8},
}


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def bytes_in_pool(engine: Engine) -> int:
    """Of the blocks that requests hold."""
    config = engine.core.scheduler.kv_cache_config
    num_held = sum(pages_in_use(engine.core.scheduler.kv_cache_manager).values())
    return num_held * config.kv_cache_tensors[0].size // config.num_blocks


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_takes_little_more_than_in_the_pool(start_engine, tmp_path, shape):
    sizes = SHAPES[shape]
    model = make_coded(tmp_path / "model", "llama", {**sizes, "max_position_embeddings": NUM_TOKENS + 8})
    options = {
        "dtype": "bfloat16",
        "max_model_len": NUM_TOKENS + 8,
        "max_num_batched_tokens": 1024,
        "kv_transfer_config": transfer(tmp_path / "store"),
    }
    with start_engine(model, PRESET, **options) as engine:
        engine.add("one", [(7 * position) % 4000 + 3 for position in range(NUM_TOKENS)], max_tokens=2)
        held = 0
        for _ in engine.steps():
            held = bytes_in_pool(engine) or held
    kept = bytes_in(tmp_path / "store")
    layers_and_classes, bytes_per_element = 2 * 2, 2
    of_bfloat16 = NUM_TOKENS * sizes["num_key_value_heads"] * sizes["head_dim"] * layers_and_classes * bytes_per_element
    assert kept < 1.15 * held
    assert 12 * kept < of_bfloat16 < 13.5 * kept


@pytest.mark.long
def test_the_limit_costs_hits_alone(start_engine, default, prompts, tmp_path):
    """What was used last is still there, on a folder for two prompts of three."""
    folder = tmp_path / "store"
    some = [prompt[::step] for prompt in prompts[-1:] for step in (1, -1)] + [prompts[-2]]
    with start_engine(EMBEDDED, PRESET, default, kv_transfer_config=transfer(folder)) as engine:
        alone = engine.complete(some, together=False)
    limit = bytes_in(folder) * 4 // 5
    shutil.rmtree(folder)
    store = transfer(folder, max_bytes=limit)
    with start_engine(EMBEDDED, PRESET, default, kv_transfer_config=store) as engine:
        for index, num_found in [(0, 0), (1, 0), (0, 512), (2, 0), (0, 512), (1, 0), (1, 512)]:
            answer = engine.complete_anew(some[index])
            assert answer.num_cached_tokens == num_found
            assert_same(answer, alone[index])
            assert bytes_in(folder) <= limit
        engine.assert_all_blocks_free()
