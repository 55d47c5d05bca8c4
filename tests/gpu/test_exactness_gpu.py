"""What real vLLM serves on a GPU equals `auto` where everything is exact, and does not depend on scheduling.

The cases are those of tests/serving/test_exactness.py that a GPU can spoil: other kernels, compilation, CUDA graphs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.completions import assert_close
from tests.serving.conftest import EMBEDDED, Completion
from tests.unit.evaluate.conftest import random_codebook
from vllm_antkv.codebook import ModelIdentity, codebook_path

pytestmark = [pytest.mark.gpu, pytest.mark.serving]

PRESET = "antkv-1bit"
Start = Callable[..., Any]
#: Differences of log-probabilities. float32: orders of summation; between `auto`'s kernels, which multiply in TF32, and
#: ours: that. 16 bits: rounding of rows and probabilities.
SAME_KERNELS, OTHER_KERNELS, SIXTEEN_BITS = 1e-3, 2e-2, 5e-2
#: More than these tests need, and nothing that has to be filled at start-up.
MEMORY = {"kv_cache_memory_bytes": 1 << 30}


@pytest.fixture(scope="module")
def default(codebooks: str) -> dict[str, Any]:
    """Default settings, with sinks to be found."""
    return {"codebooks": codebooks}


@pytest.fixture(scope="module")
def auto(start_engine: Start, prompts: list[list[int]]) -> list[Completion]:
    """What vLLM answers without us."""
    with start_engine(EMBEDDED, "auto", **MEMORY) as engine:
        return engine.complete(prompts)


@pytest.fixture(scope="module")
def alone(start_engine: Start, default: dict[str, Any], prompts: list[list[int]]) -> list[Completion]:
    """Default settings, one request at a time, whole prompts, nothing shared."""
    with start_engine(EMBEDDED, PRESET, default, enable_prefix_caching=False, **MEMORY) as engine:
        return engine.complete(prompts, together=False)


@pytest.mark.parametrize("settings", [{"prefix": 1024}, {"anchor_share": 1.0, "recency": "sliding:1"}], ids=str)
def test_equals_auto_where_every_token_is_exact(
    start_engine: Start,
    default: dict[str, Any],
    auto: list[Completion],
    prompts: list[list[int]],
    settings: dict[str, Any],
) -> None:
    with start_engine(EMBEDDED, PRESET, default | settings, max_num_batched_tokens=300, **MEMORY) as engine:
        assert_close(engine.complete(prompts), auto, OTHER_KERNELS)


def test_codes_alone_differ_from_auto(alone: list[Completion], auto: list[Completion]) -> None:
    """The comparisons of this file can fail."""
    with pytest.raises(AssertionError):
        assert_close(alone, auto, OTHER_KERNELS)


def test_same_in_mixed_batches_with_reused_blocks(
    start_engine: Start, default: dict[str, Any], alone: list[Completion], prompts: list[list[int]]
) -> None:
    """Chunks of prompts beside decodes, in pages full of NaN at first, then of what earlier requests left."""
    options = {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 200, "enable_prefix_caching": False}
    with start_engine(EMBEDDED, PRESET, default, **options) as engine:
        for pages in engine.kv_tensors():
            pages.view(torch.uint8).fill_(0xFF)
        assert_close(engine.complete(prompts), alone, SAME_KERNELS)
        assert_close(engine.complete(prompts[::-1]), alone[::-1], SAME_KERNELS)
        engine.assert_all_blocks_free()


def test_same_after_preemption(start_engine: Start, default: dict[str, Any], prompts: list[list[int]]) -> None:
    short = [prompt[:40] for prompt in prompts[1:9]]
    options = {"max_model_len": 256, "num_gpu_blocks_override": 120, "enable_prefix_caching": False}
    with start_engine(EMBEDDED, PRESET, default, disable_log_stats=False, **options) as engine:
        alone = engine.complete(short, max_tokens=110, together=False)
        together = engine.complete(short, max_tokens=110)
        metrics = {metric.name: metric for metric in engine.llm.get_metrics()}
        assert metrics["vllm:num_preemptions"].value > 0
        assert_close(together, alone, SAME_KERNELS)
        engine.assert_all_blocks_free()


def test_same_compiled_and_in_cuda_graphs(
    start_engine: Start, default: dict[str, Any], alone: list[Completion], prompts: list[list[int]]
) -> None:
    with start_engine(EMBEDDED, PRESET, default, enforce_eager=False, **MEMORY) as engine:
        assert_close(engine.complete(prompts), alone, SAME_KERNELS)
        assert_close(engine.complete(prompts, together=False), alone, SAME_KERNELS)


def test_cuda_kernels_answer_as_triton_kernels_do(
    start_engine: Start, default: dict[str, Any], prompts: list[list[int]]
) -> None:
    """In float16, since the CUDA kernels have no float32; compiled, as they are served."""
    answers = []
    for kernels in ("triton", "cuda"):
        settings = default | {"kernels": kernels}
        with start_engine(EMBEDDED, PRESET, settings, dtype="float16", enforce_eager=False, **MEMORY) as engine:
            answers.append(engine.complete(prompts))
    assert_close(*answers, SIXTEEN_BITS)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two layers with the attention of a Llama-3-8B and random weights, and settings with a codebook for them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        # Attention sharp enough for a changed row to show, and candidates far enough apart.
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    random_codebook(ModelIdentity.from_hf_config(config)).save(codebook_path(folder / "antkv", PRESET))
    return folder, {"codebooks": str(folder / "antkv")}


@pytest.mark.parametrize("kernels", ["triton", "cuda"])
def test_llama_3_8b_heads_are_served_the_same_in_chunks_and_batches(
    start_engine: Start, large: tuple[Path, dict[str, Any]], prompts: list[list[int]], kernels: str
) -> None:
    model, settings = large
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": False, **MEMORY}
    options |= {"max_num_batched_tokens": 200, "enable_prefix_caching": False}
    with start_engine(model, PRESET, settings | {"kernels": kernels}, **options) as engine:
        alone = engine.complete(prompts, together=False)
        assert_close(engine.complete(prompts), alone, SIXTEEN_BITS)
