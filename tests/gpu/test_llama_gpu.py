"""The attention of a Llama-3-8B with random weights is served the same in chunks, in batches and alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.codebooks import random_codebook
from tests.gpu.conftest import BFLOAT16, assert_close
from tests.serving.conftest import PRESET
from vllm_antkv.codebook import ModelIdentity, codebook_path

pytestmark = pytest.mark.serving


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
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
def test_llama_3_8b_heads_are_served_the_same_in_chunks_and_batches(start_engine, large, prompts, kernels):
    model, settings = large
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": False}
    options |= {"max_num_batched_tokens": 200, "enable_prefix_caching": False}
    with start_engine(model, PRESET, settings | {"kernels": kernels}, **options) as engine:
        alone = engine.complete(prompts, together=False)
        assert_close(engine.complete(prompts), alone, BFLOAT16)
