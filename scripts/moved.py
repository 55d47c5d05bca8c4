"""Where a name is that has another place in another supported release of vLLM.

The serving code needs none of them; scripts and tests do.
"""

import importlib
import importlib.util
from types import ModuleType


def kv_cache_planning() -> ModuleType:
    """Where vLLM divides memory among layers: `kv_cache_utils` in 0.32, `kv_cache_planning` from 0.33 on."""
    places = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")
    return importlib.import_module(next(name for name in places if importlib.util.find_spec(name)))
