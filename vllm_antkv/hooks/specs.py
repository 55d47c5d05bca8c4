"""Tells vLLM's block managers about recency pages."""

from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_antkv.hooks.base import Hook, missing_attributes


def _install() -> None:
    from vllm_antkv.cache.managers import RecencyManager
    from vllm_antkv.cache.specs import RecencySpec

    # The built-in specs are registered on first use, and only if nothing is registered yet: let them go first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(RecencySpec, RecencyManager, uniform_type_base_spec=RecencySpec)


HOOK = Hook(
    name="specs",
    why="registering a KV cache spec before the built-in ones makes vLLM forget those",
    upstream="https://github.com/vllm-project/vllm/issues/42449",
    install=_install,
    missing=lambda: missing_attributes(KVCacheSpecRegistry, "_ensure_registered", "register"),
    superseded=lambda: not hasattr(KVCacheSpecRegistry, "_ensure_registered"),
)
