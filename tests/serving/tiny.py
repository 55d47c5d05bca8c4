"""Tiny random models to serve: one line for each kind that is tested, and how they and their codebooks are made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.codebooks import random_codebook
from tests.serving.conftest import EMBEDDED, PRESET
from vllm_antkv.codebook import ModelIdentity, SinkRule, codebook_path

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
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + i / 8 for i in range(16)],
    "original_max_position_embeddings": 256,
}
#: A few small experts, as models name them.
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
#: A layer with a window, and one that attends to everything.
WINDOWS = ["sliding_attention", "full_attention"]
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 150, "tie_word_embeddings": True}

#: Two layers with a cache, and two that read it.
GEMMA_3N = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": 2 * WINDOWS,
    "num_kv_shared_layers": 2,
    "sliding_window": 150,
    "vocab_size_per_layer_input": 4096,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 16,
    "activation_sparsity_pattern": [0.0] * 4,
    "tie_word_embeddings": True,
}
#: Convolutions first, between and last. vLLM ties embeddings.
LFM2 = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_dim": 128,
    "block_dim": 128,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
}
#: Linear attention, which vLLM has for bfloat16 alone; a state is larger than the pages of 128 tokens.
GDN = {
    "num_hidden_layers": 4,
    "layer_types": 2 * ["linear_attention", "full_attention"],
    "head_dim": 64,
    "partial_rotary_factor": 0.5,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
#: Mamba-2, as two families name its sizes.
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}
NEMOTRON_H = {
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "attention", "mamba", "attention", "mlp"],
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 1,
    "conv_kernel": 4,
    "chunk_size": 64,
}
#: Some of it is in the configs of published models alone, which vLLM asks for.
AFMOE = {
    **EXPERTS,
    "head_dim": 32,
    "layer_types": WINDOWS,
    "sliding_window": 150,
    "num_shared_experts": 1,
    "score_func": "sigmoid",
    "route_norm": True,
    "n_group": 1,
    "topk_group": 1,
}

#: One of each family: model type, and what its config has beside SIZES.
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with windows": ("mistral", {"sliding_window": 150}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "phi3 longrope": ("phi3", {"rope_parameters": LONGROPE}),
    "gemma": ("gemma", {"head_dim": 64}),
    "gemma2": ("gemma2", GEMMA | {"layer_types": WINDOWS, "attn_logit_softcapping": 1.0}),
    "gemma3": ("gemma3_text", GEMMA | {"layer_types": WINDOWS}),
    "mixtral": ("mixtral", {**EXPERTS, "sliding_window": None}),
    "qwen2 moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3 moe": ("qwen3_moe", {**EXPERTS, "head_dim": 64}),
    "olmoe": ("olmoe", EXPERTS),
    "granite moe": ("granitemoe", {**EXPERTS, "attention_multiplier": 0.1}),
    "granite": ("granite", {"attention_multiplier": 0.1}),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "starcoder2 with windows": ("starcoder2", {"sliding_window": 150}),
    "glm": ("glm", {"head_dim": 32}),
    "glm4": ("glm4", {"head_dim": 32}),
    "stablelm": ("stablelm", {}),
    "phi2": ("phi", {}),
    "gpt neox": ("gpt_neox", {"num_key_value_heads": 4}),
    # vLLM ties their embeddings, whatever the config says.
    "cohere": ("cohere", {"tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"layer_types": WINDOWS, "sliding_window": 150, "tie_word_embeddings": True}),
    "exaone4": ("exaone4", {"layer_types": WINDOWS, "sliding_window": 150, "sliding_window_pattern": 2}),
    "olmo3": ("olmo3", {"layer_types": WINDOWS, "sliding_window": 150}),
    "gpt-oss": ("gpt_oss", {**EXPERTS, "head_dim": 64, "layer_types": WINDOWS, "sliding_window": 150}),
    "gemma3n": ("gemma3n_text", GEMMA_3N),
    "afmoe": ("afmoe", AFMOE),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "gpt2": ("gpt2", {"num_key_value_heads": 4}),
    "opt": ("opt", {"num_key_value_heads": 4, "word_embed_proj_dim": 128}),
    "lfm2": ("lfm2", LFM2),
    # A state is larger than the pages of 128 tokens: a block has those of 256.
    "lfm2 with large states": ("lfm2", LFM2 | {"conv_L_cache": 17}),
    "granite hybrid": (
        "granitemoehybrid",
        {
            **MAMBA2,
            "num_hidden_layers": 4,
            "layer_types": 2 * ["mamba", "attention"],
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.1,
        },
    ),
    "falcon h1": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 256, "head_dim": 32}),
    "nemotron h": ("nemotron_h", NEMOTRON_H),
    "qwen3 next": ("qwen3_next", {**GDN, **EXPERTS, "shared_expert_intermediate_size": 64}),
}

#: Other head sizes, dtypes, presets and tables of RoPE: model type, config, dtype of the engine, preset.
KIND: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "head 64 MHA": ("llama", {"head_dim": 64, "num_key_value_heads": 4}, "bfloat16", "antkv-2bit"),
    "head 80": ("llama", {"head_dim": 80}, "float16", "antkv-0.75bit"),
    "head 96": ("llama", {"head_dim": 96}, "bfloat16", "antkv-0.375bit"),
    "head 128": ("llama", {"head_dim": 128}, "bfloat16", "antkv-0.375bit"),
    "head 256 MQA": ("llama", {"head_dim": 256, "num_key_value_heads": 1}, "bfloat16", "antkv-0.75bit"),
    "llama 3 rope": ("llama", {"head_dim": 64, "rope_parameters": LLAMA3}, "float32", "antkv-1bit"),
    "yarn": ("llama", {"head_dim": 64, "rope_parameters": YARN}, "float32", "antkv-1bit"),
    "linear rope": ("llama", {"head_dim": 64, "rope_parameters": LINEAR}, "float32", "antkv-4bit"),
    "neighbours in 16 bits": ("glm4", {"head_dim": 64}, "bfloat16", "antkv-1bit"),
    "windows in 16 bits": ("gemma3_text", GEMMA | {"num_hidden_layers": 6}, "bfloat16", "antkv-2bit"),
    "partial rope": ("phi3", {"hidden_size": 256, "partial_rotary_factor": 0.5}, "float32", "antkv-1bit"),
}


def config_of(model_type: str, changes: dict[str, Any]) -> Any:
    return AutoConfig.for_model(model_type, **{**SIZES, **changes})


def make_model(folder: Path, model_type: str, changes: dict[str, Any]) -> Path:
    """A random model with the embedded model's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(model_type, changes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    return folder


def make_coded(folder: Path, model_type: str, changes: dict[str, Any], preset: str = PRESET, **more: Any) -> Path:
    """Such a model with a codebook, `more` as of `make_codebook`, where the server finds it."""
    make_model(folder, model_type, changes)
    make_codebook(folder / "antkv", folder, preset, **more)
    return folder


def make_codebook(folder: Path, model: Path, preset: str, sinks: SinkRule | None = None, **more: Any) -> None:
    """A codebook of random centroids; `more` of its header."""
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(model))
    codebook = random_codebook(identity, preset, sinks=sinks, **more)
    # Every head its own, and all channels alike: whatever RoPE the model has.
    shape = (identity.num_layers, identity.num_kv_heads, 1)
    exponents = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0))
    k_scale = exponents.float().exp2().repeat(1, 1, identity.head_size)
    replace(codebook, k_scale=k_scale).save(codebook_path(folder, preset))
