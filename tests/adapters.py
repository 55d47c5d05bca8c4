"""LoRA adapters of random weights, made by peft."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

EVERY_PROJECTION = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
K_AND_V = ("k_proj", "v_proj")


def make_adapter(model: Path, folder: Path, projections: tuple[str, ...] = EVERY_PROJECTION) -> Path:
    """An adapter that changes these projections by a fifth."""
    torch.manual_seed(len(projections))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=list(projections), init_lora_weights=False))
    for layer in adapted.modules():
        if hasattr(layer, "get_delta_weight"):
            of_base = layer.get_base_layer().weight.norm() / layer.get_delta_weight("default").norm()
            layer.lora_B["default"].weight.data *= of_base / 5
    adapted.save_pretrained(folder)
    return folder


def merged(model: Path, adapter: Path) -> PreTrainedModel:
    """The model with the adapter in its weights, by peft alone."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).merge_and_unload().eval()
