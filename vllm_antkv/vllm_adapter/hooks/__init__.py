"""Every touch on vLLM's internals, one file each, and the worker class. Importing this package imports vLLM."""

from vllm_antkv.vllm_adapter.hooks import (
    backend,
    config,
    connector,
    dtype,
    groups,
    metrics,
    missing_rows,
    rope_cpu,
    specs,
    states,
    status,
)
from vllm_antkv.vllm_adapter.hooks.base import Hook

#: In the order of installation.
HOOKS: tuple[Hook, ...] = (
    dtype.HOOK,
    backend.HOOK,
    specs.HOOK,
    groups.HOOK,
    states.HOOK,
    rope_cpu.HOOK,
    config.HOOK,
    connector.HOOK,
    status.HOOK,
    metrics.HOOK,
    missing_rows.HOOK,
)
