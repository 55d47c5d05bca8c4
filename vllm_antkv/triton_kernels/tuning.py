"""Autotuning: few configurations, measured once per shape and kept in Triton's cache on disk."""

from collections.abc import Callable
from typing import Any

import triton


def autotuned(configs: list[triton.Config], key: list[str]) -> Callable[[Any], Any]:
    """Decorate a kernel: the fastest of `configs` for each value of the arguments `key`.

    The kernel may run several times on the same arguments, so it must only write what it does not read. The first
    configuration is the default: it is what runs under Triton's interpreter, which has nothing to measure.
    """
    if triton.knobs.runtime.interpret:
        configs = configs[:1]
    return triton.autotune(configs=configs, key=key, cache_results=True)
