"""Export of the embedded model: a bf16 model directory for transformers and vLLM, verified before it is trusted."""

from __future__ import annotations

import json
from pathlib import Path

import embedded_text
import torch
from embedded_net import EmbeddedNet, NetConfig
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS_ID, EOS_ID, PAD_ID, END_ID = (
    embedded_text.SPECIAL_TOKENS.index(token)
    for token in (embedded_text.BOS, embedded_text.EOS, embedded_text.PAD, embedded_text.END)
)


def llama_config(config: NetConfig) -> LlamaConfig:
    """Translate the network's shape to transformers' configuration."""
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


@torch.no_grad()
def logit_difference(net: EmbeddedNet, llama: LlamaForCausalLM) -> float:
    """Largest difference of the two implementations' fp32 logits, on random ids ``(2, 300)``."""
    ids = torch.randint(0, net.config.vocab_size, (2, 300), generator=torch.Generator().manual_seed(0))
    return float((net.logits(ids, torch.float32) - llama(ids).logits).abs().max())


def export(net: EmbeddedNet, tokenizer_dir: Path, out: Path) -> float:
    """Write the model directory; return the verified logit difference, and raise if the two forwards disagree."""
    llama = LlamaForCausalLM(llama_config(net.config)).eval()
    missing, unexpected = llama.load_state_dict(net.state_dict(), strict=False)
    if unexpected or missing not in ([], ["lm_head.weight"]):  # the head is tied to the embedding
        raise ValueError(f"parameters do not match transformers: missing {missing}, unexpected {unexpected}")
    llama.tie_weights()
    difference = logit_difference(net, llama)
    if difference > 1e-3:
        raise ValueError(f"transformers' logits differ by {difference:.3g} from the training forward: not exported")
    llama.generation_config = GenerationConfig(
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, END_ID],
        pad_token_id=PAD_ID,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
    )
    llama.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it readable by its owner only
    write_portable_config(out / "config.json", net.config)
    export_tokenizer(tokenizer_dir, out)
    return difference


def write_portable_config(path: Path, config: NetConfig) -> None:
    """Add the key names of transformers 4 to the configuration that transformers 5 wrote."""
    values = json.loads(path.read_text())
    values |= {"rope_theta": config.rope_theta, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def export_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer, with a class name and special-token key that transformers 4 and 5 both know."""
    PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(out)
    path = out / "tokenizer_config.json"
    values = json.loads(path.read_text())
    for key in ("backend", "is_local", "local_files_only"):  # how it was loaded here, nothing about the model
        values.pop(key, None)
    specials = values.pop("extra_special_tokens", None) or values.get("additional_special_tokens")
    values |= {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": specials}
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
