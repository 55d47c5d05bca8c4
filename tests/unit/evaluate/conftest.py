"""Tiny random models, codebooks and texts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.codebooks import random_codebook
from vllm_antkv.codebook import ModelIdentity, SinkRule, codebook_path

VOCAB = 64
HEAD_SIZE = 32
LAYERS = 3


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model whose attention is sharp enough for a changed row to show."""
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD_SIZE,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            "sliding_window": None,
            **changes,
        },
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="session")
def identity(model_folder) -> ModelIdentity:
    return ModelIdentity.from_hf_config(AutoConfig.from_pretrained(model_folder))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, model) -> Path:
    """A model that can be loaded by name, with a tokenizer that knows the words w3 ... w63."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    model.save_pretrained(folder)
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def codebook_folder(tmp_path_factory, identity) -> Path:
    """Weighted centroids with a sink rule, and plain ones in the folder cq."""
    folder = tmp_path_factory.mktemp("codebooks")
    sinks = SinkRule(layer=0, channels=(3,), threshold=2.0)
    random_codebook(identity, sinks=sinks, weights="grad").save(codebook_path(folder, "antkv-1bit"))
    random_codebook(identity).save(codebook_path(folder / "cq", "antkv-1bit"))
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = torch.randint(3, VOCAB, (1000,), generator=torch.Generator().manual_seed(1))
    path.write_text(" ".join(f"w{i}" for i in words.tolist()))
    return path
