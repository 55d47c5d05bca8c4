"""Where a name is that has another place in another supported release of vLLM. One function for each that moved.

The serving code needs none of them; scripts, tests and benchmarks do.
"""

import importlib
import importlib.util
from types import ModuleType


def kv_cache_planning() -> ModuleType:
    """Where vLLM divides memory among layers: `kv_cache_utils` in 0.32, `kv_cache_planning` from 0.33 on."""
    return _first("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")


def serve_arguments() -> ModuleType:
    """Where the options of `vllm serve` are: `entrypoints.launchers` in 0.32, `entrypoints.common` from 0.33 on."""
    return _first("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")


def _first(*names: str) -> ModuleType:
    """The newest of these modules that this vLLM has."""
    return importlib.import_module(next(name for name in names if importlib.util.find_spec(name)))
