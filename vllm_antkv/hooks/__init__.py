"""Every touch on vLLM's internals, one file each. Importing this package imports vLLM."""

from vllm_antkv.hooks import (
    after_load,
    backend,
    config,
    dtype,
    kv_sharing,
    metrics,
    prefix_salt,
    prefix_tokens,
    specs,
    status,
)
from vllm_antkv.hooks.base import Hook

#: In the order of installation.
HOOKS: tuple[Hook, ...] = (
    dtype.HOOK,
    backend.HOOK,
    specs.HOOK,
    config.HOOK,
    after_load.HOOK,
    kv_sharing.HOOK,
    prefix_salt.HOOK,
    prefix_tokens.HOOK,
    status.HOOK,
    metrics.HOOK,
)
