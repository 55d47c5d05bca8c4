"""What is checked and completed before the engine starts: refusals, defaults, and the plan of the engine."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_antkv.cache.positions import POSITION_PAGE_BYTES
from vllm_antkv.codebook import Codebook, ModelIdentity
from vllm_antkv.codebook.automatic import CodebookRequest, find_or_make
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.errors import SettingsError
from vllm_antkv.features import num_sharing_layers
from vllm_antkv.layer_windows import layer_windows
from vllm_antkv.presets import LAYER_PRESETS, get_preset
from vllm_antkv.slow_bfloat16 import REMEDY, slow_bfloat16
from vllm_antkv.vllm_adapter.kv_transfer import identity as kv_transfer
from vllm_antkv.vllm_adapter.plan.blocks import make_blocks, set_block_size, states_of
from vllm_antkv.vllm_adapter.plan.engine_plan import EnginePlan, ServedCodebook, describe, engine_plan
from vllm_antkv.vllm_adapter.plan.refusals import refuse_unsupported

logger = logging.getLogger("vllm.antkv")

#: vLLM's default of 0 keeps only the end of each prompt, so that prompts that share a beginning hit nothing.
DEFAULT_RETENTION_INTERVAL = 512
#: What vLLM calls all layers with a sliding window, in `--kv-cache-dtype-skip-layers`.
_WINDOWS = "sliding_window"


def complete(vllm_config: VllmConfig) -> None:
    """Refuse what cannot be served, set what follows from the dtype, find or make the codebook, and plan the engine.

    Raises:
        SettingsError, UnsupportedModelError, CodebookError: with one sentence each.
    """
    settings = AntKVConfig.from_additional_config(vllm_config.additional_config)
    refuse_unsupported(vllm_config)
    _complete_options(vllm_config)
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    identity = ModelIdentity.from_hf_config(model_config.hf_config)
    get_preset(cache_config.cache_dtype).num_sub_vectors(identity.head_size)
    exact, settings = _read_skipped(cache_config.kv_cache_dtype_skip_layers, identity.decoder_indices, settings)
    cache_config.kv_cache_dtype_skip_layers = list(map(str, exact))
    request = CodebookRequest(model_config.model, model_config.revision, identity, cache_config.cache_dtype)
    path = find_or_make(request, settings)
    codebook = Codebook.load(path, cache_config.cache_dtype, identity)
    plan = _plan(vllm_config, settings, codebook, path, exact)
    if exact and plan.blocks.num_pages > 1:
        raise SettingsError(
            "--kv-cache-dtype-skip-layers is not supported in a model with states as large as those of "
            f"{identity.architecture}: leave it out, or use --kv-cache-dtype auto."
        )
    plan.carried_by(vllm_config)
    set_block_size(vllm_config, plan.blocks)
    kv_transfer.prepare(vllm_config, settings, codebook=plan.codebook.identity, exact=exact)
    _log(vllm_config, codebook)


def _read_skipped(
    words: Sequence[str], layers: Sequence[int], settings: AntKVConfig
) -> tuple[tuple[int, ...], AntKVConfig]:
    """The layers that are named by their index, and the settings that keep those exact which are named by their kind.

    words: values of `--kv-cache-dtype-skip-layers`. layers: indices of the decoder layers that attend.

    Raises SettingsError: a word names no layer, or all layers are named.
    """
    for word in words:
        if word != _WINDOWS and word not in map(str, layers):
            raise SettingsError(
                f"--kv-cache-dtype-skip-layers names {word!r}, which is neither a layer of this model that "
                f"attends ({layers[0]} to {layers[-1]}) nor {_WINDOWS}: leave it out."
            )
    skipped = tuple(sorted({int(word) for word in words if word != _WINDOWS}))
    if len(skipped) == len(layers):
        raise SettingsError("--kv-cache-dtype-skip-layers names all layers: use --kv-cache-dtype auto.")
    if _WINDOWS in words:
        # Few rows of a window are needed at a time: recency pages hold them in less memory than pages of all tokens.
        settings = settings.model_copy(update={"windows": "exact"})
    return skipped, settings


def _complete_options(vllm_config: VllmConfig) -> None:
    """Options of vLLM whose values follow from the dtype. Raises SettingsError where the user's is another."""
    cache_config, model_config = vllm_config.cache_config, vllm_config.model_config
    if vllm_config.speculative_config is not None:
        # Otherwise a model that drafts would take ours, and have no codebook.
        vllm_config.speculative_config.kv_cache_dtype = "auto"
    if cache_config.user_specified_block_size and cache_config.block_size != VQ_BLOCK_SIZE:
        raise SettingsError(
            f"--block-size {cache_config.block_size} cannot be used with {cache_config.cache_dtype}, whose blocks have "
            f"{VQ_BLOCK_SIZE} tokens: leave it out."
        )
    # Boundaries at which states can be had take a block of each group of states: with those, vLLM's default stays.
    if cache_config.prefix_cache_retention_interval == 0 and not model_config.is_hybrid:
        cache_config.prefix_cache_retention_interval = DEFAULT_RETENTION_INTERVAL
    if current_platform.is_cpu() and (slow := slow_bfloat16(model_config.dtype)):
        logger.warning("The model is in %s. %s", slow, REMEDY)


def _plan(
    vllm_config: VllmConfig, settings: AntKVConfig, codebook: Codebook, path: Path, exact: tuple[int, ...]
) -> EnginePlan:
    model_config, header = vllm_config.model_config, codebook.header
    # Layers that read the cache of another have no pages.
    with_pages = header.model.num_layers - num_sharing_layers(model_config.hf_text_config)
    windows = layer_windows(model_config.hf_text_config, model_config.max_model_len)
    is_exact = [index in exact for index in header.model.decoder_indices]
    coded, left = ([i for i in range(with_pages) if is_exact[i] is kind] for kind in (False, True))
    layers, states = tuple(header.layer_presets[index].name for index in coded), states_of(vllm_config)
    exact_windows = tuple(windows[index] for index in left)
    blocks = make_blocks(vllm_config, settings, [LAYER_PRESETS[name] for name in layers], exact_windows, states)
    return EnginePlan(
        settings=settings,
        codebook=ServedCodebook(path=str(path.resolve()), identity=codebook.identity, num_bytes=codebook.num_bytes),
        layers=layers,
        exact=exact,
        windows=tuple(windows[index] for index in coded),
        exact_windows=exact_windows,
        blocks=blocks,
        states=states,
        head_size=model_config.get_head_size(),
        dtype=str(model_config.dtype).removeprefix("torch."),
        max_model_len=model_config.max_model_len,
        position_bytes=_position_bytes(vllm_config),
    )


def _position_bytes(vllm_config: VllmConfig) -> int:
    """A KV head's share of a page of positions, which models with M-RoPE have."""
    model_config = vllm_config.model_config
    if not model_config.uses_mrope:
        return 0
    return -(-POSITION_PAGE_BYTES // model_config.get_num_kv_heads(vllm_config.parallel_config))


def _log(vllm_config: VllmConfig, codebook: Codebook) -> None:
    plan, model_config = engine_plan(vllm_config), vllm_config.model_config
    if _brings_cache_scales(model_config.hf_config):
        logger.info("Scales for an FP8 KV cache in the checkpoint are not used: codes need none.")
    if plan.settings.sinks and codebook.header.sinks is None:
        logger.info("This codebook knows no attention sinks (calibration found none in this model).")
    logger.info("antkv codebook %s (%s), %.1f MiB", plan.codebook.path, codebook.identity, codebook.num_bytes / 2**20)
    if codebook.header.layers is not None:
        logger.info("Bits by layer: %s", codebook.header.mix)
    if plan.exact:
        logger.info("Layers that stay in %s: %s", model_config.dtype, ", ".join(map(str, plan.exact)))
    for line in describe(plan, vllm_config.cache_config.cache_dtype):
        logger.info(line)


def _brings_cache_scales(hf_config: Any) -> bool:
    """Whether the checkpoint was made for an FP8 cache too (compressed-tensors, ModelOpt)."""
    given = getattr(hf_config, "quantization_config", None)
    return isinstance(given, dict) and any(given.get(name) for name in ("kv_cache_scheme", "kv_cache_quant_algo"))
