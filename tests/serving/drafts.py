"""What drafts in tests: n-grams, a model, and heads of EAGLE and EAGLE-3 in the formats of vLLM."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.serving.conftest import EMBEDDED, ROOT

#: Other heads than the model's.
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32}


def speculation(method: str, num_drafts: int, folder: Path) -> dict[str, Any]:
    """vLLM's `speculative_config`; folder: where to make a model or a head, which is for the embedded model."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": num_drafts}
    if method == "ngram":
        # One token that was there before is enough for drafts, most of which are wrong.
        return {**config, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if method == "suffix":
        return {**config, "suffix_decoding_min_token_prob": 0.0}
    if method == "draft_model":
        # Without its last layer, the model is often right.
        AutoModelForCausalLM.from_pretrained(EMBEDDED, num_hidden_layers=4).save_pretrained(folder)
    else:
        _make_head(method, folder)
    return {**config, "model": str(folder)}


def _make_head(method: str, folder: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(EMBEDDED, num_hidden_layers=1, dtype="float32", **_HEADS)
    decoder = AutoModelForCausalLM.from_config(config).model
    layer = {name: weight.clone() for name, weight in decoder.layers[0].state_dict().items()}
    if method == "eagle":
        del layer["input_layernorm.weight"]
        tensors = {f"layers.0.{name}": weight for name, weight in layer.items()} | {"fc.weight": _next_hidden()}
    else:
        config.architectures = ["LlamaForCausalLMEagle3"]
        config.eagle_aux_hidden_state_layer_ids = [1, 2, 4]
        size = config.hidden_size
        layer |= {f"self_attn.{x}_proj.weight": layer[f"self_attn.{x}_proj.weight"].repeat(1, 2) for x in "qkv"}
        tensors = {f"midlayer.{name}": weight for name, weight in layer.items()}
        tensors |= {"midlayer.hidden_norm.weight": torch.ones(size), "norm.weight": torch.ones(size)}
        tensors |= {"fc.weight": torch.randn(size, 3 * size) / size, "lm_head.weight": decoder.embed_tokens.weight}
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")


def _next_hidden() -> torch.Tensor:
    """(hidden_size, 2 * hidden_size): of a token's embedding and the hidden state before, the best guess of its own."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    text = (ROOT / "LICENSE").read_text()
    tokens = AutoTokenizer.from_pretrained(EMBEDDED)(text, return_tensors="pt")["input_ids"][0, :2000]
    with torch.inference_mode():
        hidden = model(tokens[None], output_hidden_states=True).hidden_states[-1][0]
        known = torch.cat([model.model.embed_tokens(tokens[1:]), hidden[:-1]], dim=1)
    return torch.linalg.lstsq(known, hidden[1:]).solution.T.contiguous()
