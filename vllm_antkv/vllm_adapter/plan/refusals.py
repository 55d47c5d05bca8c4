"""What cannot be served with an antkv cache, and the sentence that says so when the server starts.

The first entry of a table that a server has is the one it is told: what names a feature best stands first. Nothing here
knows of codebooks. What only the loaded layers tell is refused by themselves (`step.impl`, `load.probe`).
"""

import logging

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_antkv.cache.positions import NUM_POSITIONS
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.families import SERVED_ARCHITECTURES
from vllm_antkv.features import num_sharing_layers, rope_types, unserved_feature
from vllm_antkv.layer_windows import has_mamba2, layer_kinds, layer_windows, num_state_layers
from vllm_antkv.vllm_adapter import kv_transfer
from vllm_antkv.vllm_adapter.step.backend import BACKEND_NAME, SUPPORTED_HEAD_SIZES

logger = logging.getLogger("vllm.antkv")

#: Kinds of RoPE of which transformers has another table for long requests, and vLLM's own modules one for all.
_BY_LENGTH = {"dynamic", "longrope"}

#: Those of vLLM, whose place ours takes.
_WORKERS = ("vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker")

#: What drafts may come from.
_DRAFTS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")

#: vLLM's offloading asks for all pages of a window, most of which nobody keeps. Its tiers, and LMCache, name pages by
#: tokens, dtype and the model's name (https://github.com/vllm-project/vllm/issues/55904).
_FOREIGN = f"to which, unlike {kv_transfer.STORE}, recency pages and codebooks are unknown"

_OF_A_MODEL = "serve this model with --kv-cache-dtype auto"
_OF_AN_OPTION = "leave it out, or use --kv-cache-dtype auto"


def refuse_context_parallelism(engine_args: EngineArgs) -> None:
    """Refuse it before vLLM does, which would ask for more GPUs first.

    Ranks share out the tokens of a block (DCP), or the queries that choose its anchors (PCP): each would choose others.

    Raises:
        UnsupportedModelError: with one sentence.
    """
    features = {
        "decode context parallelism (DCP)": engine_args.decode_context_parallel_size > 1,
        "prefill context parallelism (PCP)": engine_args.prefill_context_parallel_size > 1,
    }
    _refuse(features, engine_args.kv_cache_dtype, _OF_AN_OPTION)


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Refuse models and options that an antkv cache does not work with.

    Raises:
        UnsupportedModelError: with one sentence, for the first of them.
    """
    cache_dtype = vllm_config.cache_config.cache_dtype
    _refuse(_model_features(vllm_config), cache_dtype, _OF_A_MODEL)
    _refuse(_options(vllm_config), cache_dtype, _OF_AN_OPTION)
    model_config = vllm_config.model_config
    if model_config.architecture not in SERVED_ARCHITECTURES:
        logger.warning(
            "%s is not among the models that are tested with an antkv cache: `antkv doctor %s --verify` compares its "
            "answers with those of --kv-cache-dtype auto.",
            model_config.architecture,
            model_config.model,
        )


def _refuse(features: dict[str, bool], cache_dtype: str, remedy: str) -> None:
    for feature, present in features.items():
        if present:
            raise UnsupportedModelError(f"--kv-cache-dtype {cache_dtype} does not support {feature}: {remedy}.")


def _model_features(vllm_config: VllmConfig) -> dict[str, bool]:
    """Features of models that are refused, and whether this one has them: what vLLM knows, and what the config says."""
    model_config = vllm_config.model_config
    text_config = model_config.hf_text_config
    by_length = _BY_LENGTH & rope_types(text_config)
    features = {
        "multi-head latent attention (MLA)": model_config.use_mla,
        "encoder-decoder models": model_config.is_encoder_decoder,
        "pooling models": model_config.runner_type != "generate",
        "images whose tokens attend to each other, whatever their order": model_config.is_mm_prefix_lm,
        "models without attention": model_config.is_attention_free,
        # VLLM itself has the sizes of states, and the config says which layers keep them.
        f"state-space or linear-attention layers of the kind {text_config.model_type}": (
            not layer_kinds(text_config) if model_config.is_hybrid else bool(num_state_layers(text_config))
        ),
        f"M-RoPE with {model_config.mrope_num_dims} positions per token": (
            model_config.uses_mrope and model_config.mrope_num_dims != NUM_POSITIONS
        ),
        "ALiBi": bool(model_config.uses_alibi),
    }
    if feature := unserved_feature(text_config):
        features[feature] = True
    return features | {
        f"head size {model_config.get_head_size()} (supported: {', '.join(map(str, SUPPORTED_HEAD_SIZES))})": (
            model_config.get_head_size() not in SUPPORTED_HEAD_SIZES
        ),
        f"RoPE of type {', '.join(by_length)} in models that vLLM serves through transformers": (
            bool(by_length) and model_config.using_transformers_backend()
        ),
    }


def _options(vllm_config: VllmConfig) -> dict[str, bool]:
    """Options of the server that are refused, and whether they are set."""
    cache_config = vllm_config.cache_config
    backend = vllm_config.attention_config.backend
    text_config = vllm_config.model_config.hf_text_config
    speculative = vllm_config.speculative_config
    method = None if speculative is None else speculative.method
    transfer = kv_transfer.names(vllm_config.kv_transfer_config)
    in_stages = vllm_config.parallel_config.pipeline_parallel_size > 1
    not_in_stages = {
        # Where a stage has no layer of one of vLLM's groups, vLLM ends in a `StopIteration`.
        "layers of several windows": len(set(layer_windows(text_config))) > 1,
        "layers that keep states": vllm_config.model_config.is_hybrid,
        "M-RoPE": vllm_config.model_config.uses_mrope,
        "layers that share the KV cache of others": num_sharing_layers(text_config) > 0,
        "--kv-cache-dtype-skip-layers": bool(cache_config.kv_cache_dtype_skip_layers),
        "speculative decoding": speculative is not None,
    }
    not_transferred = {
        "without prefix caching, whose hashes it needs": not cache_config.enable_prefix_caching,
        # Weights of other sources cannot be told from each other.
        "with this --load-format": vllm_config.load_config.load_format not in ("auto", "safetensors"),
    }
    not_through_nixl = {
        "pipeline parallelism": in_stages,
        "models with states": vllm_config.model_config.is_hybrid,
        "speculative decoding": speculative is not None,
    }
    return {
        # Its scan returns no states from within a prompt, with any cache dtype.
        "prefix caching beside Mamba-2 on CPUs (on by default: --no-enable-prefix-caching)": (
            current_platform.is_cpu() and bool(cache_config.enable_prefix_caching) and has_mamba2(text_config)
        ),
        f"speculative decoding by {method}": method is not None and method not in _DRAFTS,
        # VLLM then keeps more tokens than a window for them, which recency pages do not.
        "speculative decoding by several layers of MTP": method == "mtp" and speculative.use_multi_module_mtp(),
        "speculative decoding in models with states": method is not None and vllm_config.model_config.is_hybrid,
        "a kv_cache_dtype of what drafts": speculative is not None and speculative.kv_cache_dtype not in (None, "auto"),
        # vLLM offloads through a connector: the option that was given is to be named.
        f"--kv-offloading-size, {_FOREIGN}": cache_config.kv_offloading_size is not None,
        f"KV connectors other than {' and '.join(kv_transfer.MODULES)}, {_FOREIGN}": (
            not transfer <= kv_transfer.MODULES.keys()
        ),
        **{f"{name} {where}": is_so for name in transfer for where, is_so in not_transferred.items()},
        **{
            f"{kv_transfer.NIXL} with {what}, with which it has not been tested": kv_transfer.NIXL in transfer and is_so
            for what, is_so in not_through_nixl.items()
        },
        **{
            f"pipeline parallelism with {what}, with which it has not been tested": in_stages and is_so
            for what, is_so in not_in_stages.items()
        },
        # What is said of a step's tokens, which of them are sinks, would be taken for those of each half.
        "dual batch overlap (--enable-dbo, --ubatch-size)": vllm_config.parallel_config.use_ubatching,
        # Prompts would not pass through the layers that share a cache: their votes, and K and V in hand, are missing.
        "--kv-sharing-fast-prefill": cache_config.kv_sharing_fast_prefill,
        "--disable-hybrid-kv-cache-manager": vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is True,
        "--worker-cls": vllm_config.parallel_config.worker_cls not in _WORKERS,
        "--attention-backend": backend is not None and backend.name != BACKEND_NAME,
        f"the platform {current_platform.device_name}": not (current_platform.is_cpu() or current_platform.is_cuda()),
    }
