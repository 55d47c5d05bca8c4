"""M-RoPE: where tokens have three positions, real vLLM serves what the evaluator computes, however it is scheduled."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from tests.serving.conftest import assert_all_same, assert_preemption_is_not_seen
from tests.serving.grids import GRIDS, PATCH, make_grid, positions_of, register
from tests.serving.served_family import OPTIONS, PRESET, SINKS, assert_as_expected, method_of
from tests.serving.tiny import make_codebook
from tests.serving.turning import Turning
from vllm_antkv.cache.pages import page_layouts, pool_block_bytes
from vllm_antkv.cache.positions import POSITION_PAGE_BYTES
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.doctor.verify import EXACT, MAX_MODEL_LEN
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.ops.rope import rotate
from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.load.rope import three_part_tables


def pictures(*runs: int) -> list[int]:
    """A prompt with runs of text and of patches in turns."""
    tokens = [0]
    for index, length in enumerate(runs):
        tokens += [(PATCH if index % 2 else 3) + (17 * index + i) % 1000 for i in range(length)]
    return tokens


#: Pictures in the first chunk and the second, across the edges of blocks and of steps, at the end, and none.
PROMPTS = [pictures(4, 60, 30), pictures(100, 80, 20), pictures(1, 200), pictures(150, 40, 90, 30, 5), pictures(140)]
#: Preempt each other, four of each, as they grow.
SHORT = [pictures(9 + i, 30 + i, 11) for i in range(4)]


@pytest.fixture(scope="module", autouse=True)
def registered(engine_environment) -> None:
    register()


@pytest.fixture(scope="module", params=GRIDS)
def name(request) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name, tmp_path_factory) -> Path:
    folder = make_grid(tmp_path_factory.mktemp("grid") / "model", name)
    make_codebook(folder / "antkv", folder, PRESET, SINKS)
    return folder


def expected_logprobs(model: Path, name: str) -> Iterator[torch.Tensor]:
    """Log-probabilities after each prompt, from the offline evaluator on a Hugging Face model that turns so."""
    method = method_of(ModelCard.read(str(model)), PRESET)
    for prompt in PROMPTS:
        hf_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        three, _ = positions_of(prompt)
        hf_model.model.rotary_emb = Turning(GRIDS[name][3](hf_model.config), three)
        with torch.inference_mode(), quantised_past(hf_model, method, MAX_MODEL_LEN):
            yield hf_model(torch.tensor([prompt]), use_cache=False).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize(("rotary_dim", "is_neox_style"), [(64, True), (32, False)])
def test_sections_are_those_by_which_vllm_turns(dtype, in_turns, rotary_dim, is_neox_style):
    sections = [rotary_dim // 4, rotary_dim // 8, rotary_dim // 8]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, "mrope_interleaved": in_turns}
    with set_current_vllm_config(VllmConfig()):
        module = get_rope(
            64,
            512,
            is_neox_style=is_neox_style,
            rope_parameters={**rope, "partial_rotary_factor": rotary_dim / 64},
            dtype=dtype,
        )
    (table,) = three_part_tables(nn.ModuleList([module]))
    assert torch.bincount(table.sections).tolist() == sections
    positions = torch.randint(512, (3, 9))
    query, key = torch.randn(2, 9, 64).to(dtype)
    _, turned = module(positions, query.clone(), key.clone())
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    expected = rotate(key.float()[:, None], positions.T, table)[:, 0]
    torch.testing.assert_close(turned.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.long
def test_what_is_served_is_what_the_evaluator_computes(start_engine, model, name):
    with start_engine(model, PRESET, **OPTIONS, num_gpu_blocks_override=80, disable_log_stats=False) as engine:
        batched = engine.complete(PROMPTS, max_tokens=8)
        assert_as_expected(batched, list(expected_logprobs(model, name)))
        alone = engine.complete(PROMPTS, max_tokens=8, together=False)
        assert any(completion.num_cached_tokens for completion in alone)
        assert_all_same(batched, alone)
        assert_preemption_is_not_seen(engine, SHORT, times=4, max_tokens=16)


def test_exact_rows_are_autos(start_engine, model):
    with start_engine(model, "auto", **OPTIONS) as engine:
        auto = engine.complete(PROMPTS, max_tokens=8)
    with start_engine(model, PRESET, EXACT, **OPTIONS) as engine:
        assert_all_same(engine.complete(PROMPTS, max_tokens=8), auto)


def test_positions_are_a_page_of_the_pool(start_engine, model):
    """So vLLM counts them where it decides how many blocks fit, and nothing lies beside the pool."""
    memory = 8 << 20
    with start_engine(model, PRESET, **OPTIONS, kv_cache_memory_bytes=memory) as engine:
        config = engine.llm.llm_engine.vllm_config
        heads = config.model_config.get_num_kv_heads(config.parallel_config)
        num_layers = config.model_config.get_num_layers(config.parallel_config)
        layouts = page_layouts(AntKVConfig(), [PRESETS[PRESET]] * num_layers, 32, torch.float32)
        block_bytes = heads * pool_block_bytes(layouts) + POSITION_PAGE_BYTES
        assert engine.block_pool.num_gpu_blocks == memory // block_bytes
        # Those of a request are what the model was handed.
        (pages,) = [layer.pages for key, layer in engine.layers.items() if key.endswith(".antkv_positions")]
        engine.complete(PROMPTS[1:2], max_tokens=1)
        three, _ = positions_of(PROMPTS[1])
        first = three.T[:VQ_BLOCK_SIZE]
        assert any(len(set(positions)) == 3 for positions in first.tolist())
        assert any(torch.equal(page, first.int()) for page in pages)
