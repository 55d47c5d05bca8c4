"""Makes the presets values of `--kv-cache-dtype`.

How depends on what vLLM has: `dtype_registry.py` where it has a registry, `dtype_literal.py` where it has none. A typo
stays an error, other values behave as before.
"""

import torch
from vllm.config import cache as cache_module
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.hooks.base import Hook

if hasattr(cache_module, "register_kv_cache_dtype"):
    from vllm_antkv.vllm_adapter.hooks.dtype_registry import install, known_dtypes, missing
else:
    from vllm_antkv.vllm_adapter.hooks.dtype_literal import install, known_dtypes, missing

__all__ = ["HOOK", "known_dtypes"]


def _verify() -> str | None:
    """The presets must be values of the option, and their pages bytes that vLLM's own code knows nothing of."""
    for preset in PRESETS:
        # Raises where it is refused.
        cache_module.CacheConfig(cache_dtype=preset)  # type: ignore[arg-type]
        if get_kv_quant_mode(preset) is not KVQuantMode.NONE:
            return f"{preset} has the quantisation mode {get_kv_quant_mode(preset).name}"
        if STR_DTYPE_TO_TORCH_DTYPE.get(preset) is not torch.uint8:
            return f"{preset} is stored as {STR_DTYPE_TO_TORCH_DTYPE.get(preset)}"
    return None


HOOK = Hook(
    name="dtype",
    why="plugins cannot register values of --kv-cache-dtype in vLLM 0.32",
    upstream="https://github.com/vllm-project/vllm/issues/51751",
    install=install,
    missing=missing,
    verify=_verify,
    # What stays where vLLM has a registry is the registration.
    superseded=lambda: False,
)
