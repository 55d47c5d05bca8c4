"""What drafts in tests: n-grams, a model, heads of EAGLE and EAGLE-3, and a layer of the model itself (MTP)."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import rms_norm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.places import ROOT
from tests.serving.conftest import EMBEDDED

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
    if method == "mtp":
        return config
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


def make_glm(folder: Path) -> Path:
    """The embedded model as a GLM-4-MoE whose routed experts give zeros, with a layer behind the last that drafts."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    config, tensors = model.config, {name: weight.clone() for name, weight in model.state_dict().items()}
    size, inner, last = config.hidden_size, config.intermediate_size, config.num_hidden_layers - 1
    dense, mtp = f"model.layers.{last}.", f"model.layers.{last + 1}."
    tensors |= {name.replace(dense, mtp): weight.clone() for name, weight in tensors.items() if dense in name}
    # All that the drafting layer knows is in its first projection.
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"{mtp}{name}.weight"].zero_()
    for layer in (dense, mtp):
        for name in ("gate", "up", "down"):
            weight = tensors.pop(f"{layer}mlp.{name}_proj.weight")
            tensors[f"{layer}mlp.shared_experts.{name}_proj.weight"] = weight
            tensors |= {f"{layer}mlp.experts.{i}.{name}_proj.weight": torch.zeros_like(weight) for i in range(2)}
        tensors |= {f"{layer}mlp.gate.weight": torch.zeros(2, size)}
        tensors |= {f"{layer}mlp.gate.e_score_correction_bias": torch.zeros(2)}
    tensors |= {f"{mtp}{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= {f"{mtp}eh_proj.weight": _next_hidden(normed=True), "lm_head.weight": model.lm_head.weight.clone()}
    changes = {
        "architectures": ["Glm4MoeForCausalLM"],
        "tie_word_embeddings": False,
        "partial_rotary_factor": 1.0,
        "moe_intermediate_size": inner,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": last,
        "num_nextn_predict_layers": 1,
    }
    kept = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    AutoConfig.for_model("glm4_moe", **{**kept, **changes}).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _next_hidden(normed: bool = False) -> torch.Tensor:
    """(hidden_size, 2 * hidden_size): of a token's embedding and the hidden state before, the best guess of its own."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    text = (ROOT / "LICENSE").read_text()
    tokens = AutoTokenizer.from_pretrained(EMBEDDED)(text, return_tensors="pt")["input_ids"][0, :2000]
    with torch.inference_mode():
        hidden = model(tokens[None], output_hidden_states=True).hidden_states[-1][0]
        known = [model.model.embed_tokens(tokens[1:]), hidden[:-1]]
        known = torch.cat([rms_norm(x, x.shape[-1:]) if normed else x for x in known], dim=1)
    return torch.linalg.lstsq(known, hidden[1:]).solution.T.contiguous()
