"""What is checked and completed before the engine starts: refusals, defaults, and which codebook is served."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_antkv.attention.backend import SUPPORTED_HEAD_SIZES
from vllm_antkv.attention.footprint import describe
from vllm_antkv.codebook import Codebook, ModelIdentity, find_codebook
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.errors import SettingsError, UnsupportedModelError
from vllm_antkv.presets import get_preset

logger = logging.getLogger("vllm.antkv")

#: Families whose attention is exercised by the tests.
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
)
#: Where `complete` leaves the codebook it found for the workers; part of vLLM's compile cache key.
_RESOLVED_KEY = "antkv_codebook"
#: vLLM's default of 0 keeps only the end of each prompt, so that prompts that share a beginning hit nothing.
DEFAULT_RETENTION_INTERVAL = 512


@dataclass(frozen=True)
class ResolvedCodebook:
    """The codebook file chosen at start-up, and the bytes of its centroids."""

    path: str
    identity: str
    num_bytes: int


def complete(vllm_config: VllmConfig) -> None:
    """Refuse what cannot be served, set what follows from the dtype, find and check the codebook.

    Raises:
        SettingsError, UnsupportedModelError, CodebookError: with one sentence each.
    """
    settings = AntKVConfig.from_additional_config(vllm_config.additional_config)
    _refuse_unsupported(vllm_config)
    cache_config = vllm_config.cache_config
    if cache_config.user_specified_block_size and cache_config.block_size != VQ_BLOCK_SIZE:
        raise SettingsError(
            f"--block-size {cache_config.block_size} cannot be used with {cache_config.cache_dtype}, whose blocks have "
            f"{VQ_BLOCK_SIZE} tokens: leave it out."
        )
    cache_config.block_size = VQ_BLOCK_SIZE
    if cache_config.prefix_cache_retention_interval == 0:
        cache_config.prefix_cache_retention_interval = DEFAULT_RETENTION_INTERVAL
    model_config = vllm_config.model_config
    identity = ModelIdentity.from_hf_config(model_config.hf_config)
    get_preset(cache_config.cache_dtype).num_sub_vectors(identity.head_size)
    path = find_codebook(model_config.model, identity, cache_config.cache_dtype, settings.codebooks)
    codebook = Codebook.load(path, cache_config.cache_dtype, identity)
    resolved = ResolvedCodebook(str(Path(path).resolve()), codebook.identity, codebook.num_bytes)
    vllm_config.additional_config = {**vllm_config.additional_config, _RESOLVED_KEY: asdict(resolved)}
    if settings.sinks and codebook.header.sinks is None:
        logger.info("This codebook knows no attention sinks (calibration found none in this model).")
    logger.info("antkv codebook %s (%s), %.1f MiB", path, codebook.identity, codebook.num_bytes / 2**20)
    for line in describe(vllm_config, settings):
        logger.info(line)


def resolved_codebook(vllm_config: VllmConfig) -> ResolvedCodebook:
    """The codebook that `complete` chose."""
    entry: dict[str, Any] = vllm_config.additional_config[_RESOLVED_KEY]
    return ResolvedCodebook(**entry)


def _refuse_unsupported(vllm_config: VllmConfig) -> None:
    model_config = vllm_config.model_config
    parallel_config = vllm_config.parallel_config
    cache_config = vllm_config.cache_config
    text_config = model_config.hf_text_config
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    refused = {
        "multi-head latent attention (MLA)": model_config.use_mla,
        "encoder-decoder models": model_config.is_encoder_decoder,
        "pooling models": model_config.runner_type != "generate",
        "multimodal models": model_config.is_multimodal_model,
        "sliding-window attention (for Mistral-style models, --hf-overrides '{\"sliding_window\": null}' serves them "
        "with full attention)": cache_config.sliding_window is not None or "sliding_attention" in layer_types,
        "attention with a logits soft cap": bool(getattr(text_config, "attn_logit_softcapping", None)),
        f"the architecture {model_config.architecture} (supported: {', '.join(SUPPORTED_ARCHITECTURES)})": (
            model_config.architecture not in SUPPORTED_ARCHITECTURES
        ),
        f"head size {model_config.get_head_size()} (supported: {', '.join(map(str, SUPPORTED_HEAD_SIZES))})": (
            model_config.get_head_size() not in SUPPORTED_HEAD_SIZES
        ),
        "speculative decoding": vllm_config.speculative_config is not None,
        "KV connectors": vllm_config.kv_transfer_config is not None,
        "KV offloading": cache_config.kv_offloading_size is not None,
        "LoRA adapters": vllm_config.lora_config is not None,
        "decode context parallelism": parallel_config.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel_config.prefill_context_parallel_size > 1,
        "pipeline parallelism": parallel_config.pipeline_parallel_size > 1,
        "--kv-cache-dtype-skip-layers": bool(cache_config.kv_cache_dtype_skip_layers),
        "--disable-hybrid-kv-cache-manager": vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is True,
        f"the platform {current_platform.device_name}": not (current_platform.is_cpu() or current_platform.is_cuda()),
    }
    for feature, present in refused.items():
        if present:
            raise UnsupportedModelError(
                f"--kv-cache-dtype {cache_config.cache_dtype} does not support {feature}: leave it out, or use "
                "--kv-cache-dtype auto."
            )
