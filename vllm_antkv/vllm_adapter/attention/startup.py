"""What is checked and completed before the engine starts: refusals, defaults, and which codebook is served."""

import logging
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_antkv.codebook import Codebook, ModelIdentity
from vllm_antkv.codebook.automatic import CodebookRequest, find_or_make
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.errors import SettingsError
from vllm_antkv.features import num_sharing_layers
from vllm_antkv.presets import LAYER_PRESETS, Preset, get_preset
from vllm_antkv.slow_bfloat16 import REMEDY, slow_bfloat16
from vllm_antkv.vllm_adapter.attention.blocks import block_plan, make_plan
from vllm_antkv.vllm_adapter.attention.exact_layers import read_skipped
from vllm_antkv.vllm_adapter.attention.footprint import describe, outgrown_windows, served_layouts
from vllm_antkv.vllm_adapter.attention.refusals import refuse_unsupported
from vllm_antkv.vllm_adapter.kv_transfer import identity as kv_transfer

logger = logging.getLogger("vllm.antkv")

_SETTINGS_KEY = "antkv"
#: Where `complete` leaves the codebook it found for the workers; part of vLLM's compile cache key.
_RESOLVED_KEY = "antkv_codebook"
#: vLLM's default of 0 keeps only the end of each prompt, so that prompts that share a beginning hit nothing.
DEFAULT_RETENTION_INTERVAL = 512


@dataclass(frozen=True)
class ResolvedCodebook:
    """The codebook file chosen at start-up.

    num_bytes: of its centroids.
    layers: preset of every layer that has codes.
    exact: layers that `--kv-cache-dtype-skip-layers` names.
    num_beside: how many of those have pages in the blocks of the VQ pages: without a window.
    """

    path: str
    identity: str
    num_bytes: int
    layers: tuple[str, ...]
    exact: tuple[int, ...]
    num_beside: int

    @property
    def presets(self) -> list[Preset]:
        """Of every layer that has codes."""
        return [LAYER_PRESETS[name] for name in self.layers]


def complete(vllm_config: VllmConfig) -> None:
    """Refuse what cannot be served, set what follows from the dtype, find or make the codebook, and check it.

    Raises:
        SettingsError, UnsupportedModelError, CodebookError: with one sentence each.
    """
    settings = AntKVConfig.from_additional_config(vllm_config.additional_config)
    refuse_unsupported(vllm_config)
    cache_config = vllm_config.cache_config
    if vllm_config.speculative_config is not None:
        # Otherwise a model that drafts would take ours, and have no codebook.
        vllm_config.speculative_config.kv_cache_dtype = "auto"
    if cache_config.user_specified_block_size and cache_config.block_size != VQ_BLOCK_SIZE:
        raise SettingsError(
            f"--block-size {cache_config.block_size} cannot be used with {cache_config.cache_dtype}, whose blocks have "
            f"{VQ_BLOCK_SIZE} tokens: leave it out."
        )
    # Boundaries at which states can be had take a block of each group of states: with those, vLLM's default stays.
    if cache_config.prefix_cache_retention_interval == 0 and not vllm_config.model_config.is_hybrid:
        cache_config.prefix_cache_retention_interval = DEFAULT_RETENTION_INTERVAL
    model_config = vllm_config.model_config
    if current_platform.is_cpu() and (slow := slow_bfloat16(model_config.dtype)):
        logger.warning("The model is in %s. %s", slow, REMEDY)
    identity = ModelIdentity.from_hf_config(model_config.hf_config)
    get_preset(cache_config.cache_dtype).num_sub_vectors(identity.head_size)
    exact, settings = read_skipped(cache_config.kv_cache_dtype_skip_layers, identity.decoder_indices, settings)
    cache_config.kv_cache_dtype_skip_layers = list(map(str, exact))
    request = CodebookRequest(model_config.model, model_config.revision, identity, cache_config.cache_dtype)
    path = find_or_make(request, settings)
    codebook = Codebook.load(path, cache_config.cache_dtype, identity)
    # Layers that read the cache of another have no pages.
    with_pages = range(identity.num_layers - num_sharing_layers(model_config.hf_text_config))
    windows = outgrown_windows(vllm_config)
    is_exact = [index in exact for index in identity.decoder_indices]
    layers = tuple(codebook.header.layer_presets[index].name for index in with_pages if not is_exact[index])
    resolved = ResolvedCodebook(
        path=str(Path(path).resolve()),
        identity=codebook.identity,
        num_bytes=codebook.num_bytes,
        layers=layers,
        exact=exact,
        num_beside=sum(is_exact[index] and windows[index] is None for index in with_pages),
    )
    vllm_config.additional_config = {
        **vllm_config.additional_config,
        _SETTINGS_KEY: settings.model_dump(),
        _RESOLVED_KEY: asdict(resolved),
    }
    kv_transfer.prepare(vllm_config, settings, codebook=resolved.identity, exact=exact)
    make_plan(vllm_config, settings, partial(served_layouts, vllm_config, settings, resolved.presets, exact))
    num_pages = block_plan(vllm_config).num_pages
    if exact and num_pages > 1:
        raise SettingsError(
            "--kv-cache-dtype-skip-layers is not supported in a model with states as large as those of "
            f"{identity.architecture}: leave it out, or use --kv-cache-dtype auto."
        )
    if _brings_cache_scales(model_config.hf_config):
        logger.info("Scales for an FP8 KV cache in the checkpoint are not used: codes need none.")
    if settings.sinks and codebook.header.sinks is None:
        logger.info("This codebook knows no attention sinks (calibration found none in this model).")
    logger.info("antkv codebook %s (%s), %.1f MiB", path, codebook.identity, codebook.num_bytes / 2**20)
    if codebook.header.layers is not None:
        logger.info("Bits by layer: %s", codebook.header.mix)
    if exact:
        logger.info("Layers that stay in %s: %s", model_config.dtype, ", ".join(map(str, exact)))
    for line in describe(vllm_config, settings, resolved.presets, exact):
        logger.info(line)


def _brings_cache_scales(hf_config: Any) -> bool:
    """Whether the checkpoint was made for an FP8 cache too (compressed-tensors, ModelOpt)."""
    given = getattr(hf_config, "quantization_config", None)
    return isinstance(given, dict) and any(given.get(name) for name in ("kv_cache_scheme", "kv_cache_quant_algo"))


def resolved_codebook(vllm_config: VllmConfig) -> ResolvedCodebook:
    """The codebook that `complete` chose."""
    entry: dict[str, Any] = vllm_config.additional_config[_RESOLVED_KEY]
    return ResolvedCodebook(**entry)
