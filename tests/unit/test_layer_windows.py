"""Which layers of a model attend is read from its config, and a codebook has those."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.serving.tiny import LFM2, config_of
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.layer_windows import attention_layers, layer_windows
from vllm_antkv.offline.traits import layer_traits

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
#: Model type, what its config has, the layers that attend.
CONFIGS: dict[str, tuple[str, dict[str, Any], tuple[int, ...] | None]] = {
    "all": ("llama", {"num_hidden_layers": 3}, None),
    "windows": ("gemma2", {"num_hidden_layers": 4}, None),
    "convolutions": ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}, (1,)),
    "every fourth": ("qwen3_next", {"num_hidden_layers": 8}, (3, 7)),
    "state and attention in each": ("falcon_h1", {"num_hidden_layers": 4}, None),
    "experts as layers": ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, (2,)),
}


@pytest.mark.parametrize(("model_type", "changes", "attending"), CONFIGS.values(), ids=CONFIGS.keys())
def test_the_layers_that_attend(model_type, changes, attending):
    config = AutoConfig.for_model(model_type, **SIZES, **changes)
    assert attention_layers(config) == attending
    identity = ModelIdentity.from_hf_config(config)
    assert identity.num_layers == len(layer_windows(config)) == len(identity.decoder_indices)
    assert identity.decoder_indices == (attending or tuple(range(identity.num_layers)))
    text = identity.model_dump_json()
    # Of models whose layers all attend, files and names of folders stay as they were.
    assert ("attention_layers" in text) == (attending is not None)
    assert ModelIdentity.model_validate_json(text, strict=True) == identity


def test_a_model_without_attention_is_refused():
    with pytest.raises(UnsupportedModelError, match="num_layers 0"):
        ModelIdentity.from_hf_config(AutoConfig.for_model("granitemoehybrid", **SIZES))


def test_convolutions_do_not_hide_how_keys_turn():
    """They see fewer tokens at the beginning of a sequence."""
    model = AutoModelForCausalLM.from_config(config_of("lfm2", LFM2 | {"initializer_range": 0.5})).eval()
    assert [layer.turn for layer in layer_traits(model)] == [0, 0]
