"""Every supported family, head size, RoPE and dtype serves in real vLLM what the offline evaluator computes.

Random tiny models; what cannot be served is in test_refusals.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.serving.conftest import EMBEDDED
from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, ModelIdentity, SinkRule, codebook_path
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.families import FAMILIES
from vllm_antkv.laboratory.base import MethodRequest
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.presets import PRESETS

pytestmark = pytest.mark.serving

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 150, "tie_word_embeddings": True}
GPT_OSS = {
    "head_dim": 64,
    "sliding_window": 150,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    # vLLM takes nothing else for this model.
    "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}

#: model type, its config, dtype of the engine, preset.
SUPPORTED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "llama head 32": ("llama", {"head_dim": 32}, "float32", "antkv-1bit"),
    "llama head 64 MHA": ("llama", {"head_dim": 64, "num_key_value_heads": 4}, "bfloat16", "antkv-2bit"),
    "llama head 80": ("llama", {"head_dim": 80}, "float16", "antkv-0.75bit"),
    "llama head 96": ("llama", {"head_dim": 96}, "bfloat16", "antkv-0.375bit"),
    "llama head 128": ("llama", {"head_dim": 128}, "bfloat16", "antkv-0.375bit"),
    "llama head 256 MQA": ("llama", {"head_dim": 256, "num_key_value_heads": 1}, "bfloat16", "antkv-0.75bit"),
    "llama 3 rope": ("llama", {"head_dim": 64, "rope_parameters": LLAMA3}, "float32", "antkv-1bit"),
    "llama yarn": ("llama", {"head_dim": 64, "rope_parameters": YARN}, "float32", "antkv-1bit"),
    "llama linear rope": ("llama", {"head_dim": 64, "rope_parameters": LINEAR}, "float32", "antkv-4bit"),
    "mistral": ("mistral", {"head_dim": 64, "sliding_window": None}, "float32", "antkv-1bit"),
    "mistral with windows": ("mistral", {"head_dim": 64, "sliding_window": 150}, "bfloat16", "antkv-1bit"),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 1.0}, "float32", "antkv-1bit"),
    "gpt-oss": ("gpt_oss", GPT_OSS, "float32", "antkv-1bit"),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 6}, "bfloat16", "antkv-2bit"),
    "qwen2": ("qwen2", {"hidden_size": 256}, "float32", "antkv-4bit"),
    "qwen3": ("qwen3", {"head_dim": 64}, "float32", "antkv-1bit"),
    "phi3 partial rope": ("phi3", {"hidden_size": 256, "partial_rotary_factor": 0.5}, "float32", "antkv-1bit"),
}


def make_model(folder: Path, model_type: str, changes: dict[str, Any]) -> Path:
    """A random model with the embedded model's tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    return folder


def make_codebook(folder: Path, model: Path, preset: str, sinks: SinkRule | None = None) -> None:
    """A codebook of random centroids."""
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(model))
    kind = PRESETS[preset]
    shape = (
        identity.num_layers,
        identity.num_kv_heads,
        kind.num_sub_vectors(identity.head_size),
        kind.num_centroids,
        kind.sub_vector_size,
    )
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(shape, generator=generator).half() for _ in "kv")
    header = CodebookHeader(
        format_version=FORMAT_VERSION, preset=preset, model=identity, sinks=sinks, calibration={"text": "random"}
    )
    Codebook(header, tuple(k), tuple(v)).save(codebook_path(folder, preset))


def test_every_served_family_is_among_them() -> None:
    assert {model_type for model_type, *_ in SUPPORTED.values()} == {
        family.model_type for family in FAMILIES.values() if family.served
    }


PROMPTS = [[0, *range(3 + i, 3 + i + length)] for i, length in enumerate((5, 126, 127, 200, 300))]


def expected_logprobs(model: Path, preset: str) -> list[torch.Tensor]:
    """Log-probabilities after each prompt, from the offline evaluator on the Hugging Face model in float32."""
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(model))
    method = build_method(preset, MethodRequest(str(model), identity, None, AntKVConfig()))
    hf_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode(), quantised_past(hf_model, method, 512):
        return [hf_model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1) for ids in PROMPTS]


@pytest.mark.parametrize(("model_type", "changes", "dtype", "preset"), SUPPORTED.values(), ids=SUPPORTED.keys())
def test_supported(
    start_engine: Callable[..., Any],
    tmp_path: Path,
    model_type: str,
    changes: dict[str, Any],
    dtype: str,
    preset: str,
) -> None:
    model = make_model(tmp_path / "model", model_type, changes)
    make_codebook(tmp_path / "model" / "antkv", model, preset, SinkRule(layer=0, channels=(3,), threshold=0.05))
    expected = expected_logprobs(model, preset)
    # In 16 bits some rows lie nearer to another centroid than in 32.
    tolerance = 1e-3 if dtype == "float32" else 0.1
    with start_engine(model, preset, dtype=dtype, max_model_len=512, max_num_batched_tokens=256) as engine:
        for completion, logprobs in zip(engine.complete(PROMPTS, max_tokens=3), expected, strict=True):
            for token, logprob in completion.top_logprobs[0].items():
                assert logprob == pytest.approx(float(logprobs[token]), abs=tolerance)
        engine.assert_all_blocks_free()
