"""What an antkv cache cannot serve of a model, as far as its Hugging Face config tells.

Servers refuse it before weights are read; `antkv doctor` and `antkv plan` say it without vLLM. Pure Python.
"""

from typing import Any

from vllm_antkv.layer_windows import layer_kinds, layer_windows


def unserved_feature(config: Any) -> str | None:
    """The first feature that an antkv cache cannot serve, as a refusal names it; None: nothing is against the model.

    Args:
        config: the config of the text model.
    """
    return next((feature for feature, present in _features(config).items() if present), None)


def _features(config: Any) -> dict[str, bool]:
    """What names a model best stands first."""
    ropes = _rope_parameters(config)
    kinds = set(layer_kinds(config))
    return {
        "multi-head latent attention (MLA)": bool(getattr(config, "kv_lora_rank", None)),
        "encoder-decoder models": bool(getattr(config, "is_encoder_decoder", False)),
        "M-RoPE beside sliding windows": (
            any("mrope_section" in rope for rope in ropes) and any(layer_windows(config))
        ),
        "ALiBi": bool(getattr(config, "alibi", False)) or getattr(config, "model_type", "") in ("bloom", "mpt"),
        "dual chunk attention": bool(getattr(config, "dual_chunk_attention_config", None)),
        "attention that is not causal": not getattr(config, "is_causal", True),
        "chunked attention": "chunked_attention" in kinds and bool(getattr(config, "attention_chunk_size", None)),
        "Fourier position embeddings (FoPE)": any(rope.get("use_fope") for rope in ropes),
    }


def has_plain_logits(config: Any) -> bool:
    """Whether logits are mere products of keys that rotate by one position: no soft cap, learned sinks or M-RoPE.

    Windows are not looked at (`layer_windows`). config: of the text model.
    """
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "model_type", "") == "gpt_oss":
        return False
    return not any("mrope_section" in rope for rope in _rope_parameters(config))


def num_sharing_layers(config: Any) -> int:
    """How many layers, the last ones, read the KV cache of an earlier layer instead of one of their own."""
    return getattr(config, "num_kv_shared_layers", None) or 0


def rope_types(config: Any) -> set[str]:
    """Kinds of RoPE, of all kinds of layers."""
    return {str(rope.get("rope_type", "default")) for rope in _rope_parameters(config)}


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One for each kind of layers, where they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in rope.values() if isinstance(each, dict)]
    return nested or [rope]
