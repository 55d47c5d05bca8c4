"""Where a name is that has another place in another supported release of vLLM, beside what the hooks know."""

import importlib
import importlib.util
from types import ModuleType


def serve_arguments() -> ModuleType:
    """Where the options of `vllm serve` are: `entrypoints.launchers` in 0.32, `entrypoints.common` from 0.33 on."""
    names = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
    return importlib.import_module(next(name for name in names if importlib.util.find_spec(name)))
