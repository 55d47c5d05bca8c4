"""Makes the presets values of `--kv-cache-dtype`.

How depends on what vLLM has: `dtype_registry.py` where it has a registry, `dtype_literal.py` where it has none. A typo
stays an error, other values behave as before.
"""

from vllm.config import cache as cache_module

from vllm_antkv.hooks.base import Hook

if hasattr(cache_module, "register_kv_cache_dtype"):
    from vllm_antkv.hooks.dtype_registry import install, known_dtypes, missing
else:
    from vllm_antkv.hooks.dtype_literal import install, known_dtypes, missing

__all__ = ["HOOK", "known_dtypes"]

HOOK = Hook(
    name="dtype",
    why="plugins cannot register values of --kv-cache-dtype in vLLM 0.32",
    upstream="https://github.com/vllm-project/vllm/issues/51751",
    install=install,
    missing=missing,
    # What stays where vLLM has a registry is the registration.
    superseded=lambda: False,
)
