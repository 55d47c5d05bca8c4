"""Tiny random models of every supported family, with a tokenizer, and a text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.serving.tiny import EXPERTS

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
#: What each family needs beside COMMON: those whose layers differ in what capturing depends on.
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"head_dim": 8},  # it derives the head size
    "qwen3": {},
    "phi3": {"head_dim": 8},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 16},  # two RoPE bases
    "gpt_oss": {**EXPERTS, "sliding_window": 16},  # learned sink logits
    "mixtral": {**EXPERTS, "head_dim": 8},
    "qwen3_moe": EXPERTS,
    "granitemoe": {**EXPERTS, "head_dim": 8},
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 48, "num_hidden_layers": 4},  # a layer without RoPE
    "smollm3": {"head_dim": 8, "num_hidden_layers": 4},  # a layer without RoPE
    "cohere": {"head_dim": 8},  # neighbours turn
    "glm4": {},  # half of the neighbours
    "stablelm": {"head_dim": 8},  # a quarter of the channels
    "gpt_neox": {"head_dim": 8, "num_key_value_heads": 4},
    "olmo2": {"head_dim": 8},  # norms over all heads
    "gpt2": {"head_dim": 8, "num_key_value_heads": 4},  # no RoPE
    "opt": {"head_dim": 8, "num_key_value_heads": 4},
}


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """About 12,000 words."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    generator = torch.Generator().manual_seed(0)
    words = ["stone", "river", "walks", "under", "seven", "bridges", "and", "never", "asks", "why", "or", "where"]
    picks = torch.randint(len(words), (12_000,), generator=generator)
    path.write_text(" ".join(words[pick] + ("." if pick == 3 else "") for pick in picks))
    return path


@pytest.fixture(scope="session")
def tokenizer(text_file) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text_file.read_text()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def make_model(tmp_path_factory, tokenizer) -> Callable[..., Path]:
    """Saves a random model of a family: make_model("llama", num_hidden_layers=4) -> its folder."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(family: str, edit: Callable[[torch.nn.Module], None] | None = None, **changes: Any) -> Path:
        key = (family, edit, str(sorted(changes.items())))
        if key not in made:
            torch.manual_seed(0)
            config = AutoConfig.for_model(family, **{**COMMON, **FAMILY_SETTINGS.get(family, {}), **changes})
            model = AutoModelForCausalLM.from_config(config)
            # The default initialisation is so small that attention is uniform and gradients are nearly equal.
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    torch.nn.init.normal_(parameter, std=0.3)
            if edit is not None:
                edit(model)
            made[key] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[key])
            tokenizer.save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_model) -> Path:
    return make_model("llama")
