"""Values of `--kv-cache-dtype` for vLLM 0.32, which has no registry; this file goes when that release does.

The cache dtypes are a Literal: its arguments are extended in place, and the pydantic dataclass and the argument parser
that were made from it are made again.
"""

from functools import partial
from typing import get_args

import torch
from pydantic.dataclasses import rebuild_dataclass
from vllm.config import cache as cache_module
from vllm.engine import arg_utils
from vllm.utils import torch_utils

from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.hooks.base import Patches, missing_attributes


def known_dtypes() -> tuple[str, ...]:
    """The values that vLLM accepts for `--kv-cache-dtype` by now."""
    return get_args(cache_module.CacheDType)


def install(patches: Patches) -> None:
    """Add the presets."""
    # Undone last, when the Literal is as it was.
    patches.on_undo(_make_again)
    patches.set(cache_module.CacheDType, "__args__", (*known_dtypes(), *PRESETS))
    _make_again()
    for name in PRESETS:
        # Opaque bytes: the backend alone knows what they mean.
        torch_utils.STR_DTYPE_TO_TORCH_DTYPE[name] = torch.uint8
        patches.on_undo(partial(torch_utils.STR_DTYPE_TO_TORCH_DTYPE.pop, name))


def _make_again() -> None:
    """What was made from the Literal."""
    rebuild_dataclass(cache_module.CacheConfig, force=True)
    arg_utils._compute_kwargs.cache_clear()


def missing() -> str | None:
    """What is not where `install` expects it, or None."""
    return (
        missing_attributes(cache_module, "CacheDType", "CacheConfig")
        or missing_attributes(cache_module.CacheDType, "__args__")
        or missing_attributes(arg_utils._compute_kwargs, "cache_clear")
        or missing_attributes(torch_utils, "STR_DTYPE_TO_TORCH_DTYPE")
    )
