"""Values of `--kv-cache-dtype` through vLLM's own registry, which it has from 0.33 on."""

from functools import partial

import torch
from vllm.config import cache as cache_module
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import KVQuantMode

from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.hooks.base import Patches, missing_attributes


class PresetHandler:
    """What vLLM's own code is told about a preset: bytes that mean nothing to it."""

    name: str

    def torch_dtype(self) -> torch.dtype:
        """Opaque bytes: the backend alone knows what they mean."""
        return torch.uint8

    def quant_mode(self) -> KVQuantMode:
        """As for a name that vLLM does not know.

        Never KVQuantMode.CUSTOM, which vLLM recommends: in 0.33.0 that is another name of OCTAVE_K3V4.
        """
        return KVQuantMode.NONE


def known_dtypes() -> tuple[str, ...]:
    """The values that vLLM accepts for `--kv-cache-dtype` by now."""
    return tuple(cache_module.KV_CACHE_DTYPES)


def install(patches: Patches) -> None:
    """Register the presets."""
    for preset in PRESETS:
        cache_module.register_kv_cache_dtype(preset)(type("PresetHandler", (PresetHandler,), {"name": preset}))
        patches.on_undo(partial(_forget, preset))


def _forget(preset: str) -> None:
    """Take a name out of the registry, which has no function for that."""
    cache_module.KV_CACHE_DTYPES.remove(preset)
    del cache_module._KV_CACHE_DTYPE_HANDLERS[preset], STR_DTYPE_TO_TORCH_DTYPE[preset]


def missing() -> str | None:
    """What is not where `install` expects it, or None."""
    return missing_attributes(cache_module, "KV_CACHE_DTYPES", "_KV_CACHE_DTYPE_HANDLERS", "CacheConfig")
