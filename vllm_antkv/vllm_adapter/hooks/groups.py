"""Lets as many layers share a block table as a block has room for (`block_pool.groups`)."""

import importlib
import importlib.util
import inspect
from functools import wraps
from types import ModuleType

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

from vllm_antkv.vllm_adapter.block_pool.groups import regrouped
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec
from vllm_antkv.vllm_adapter.hooks.base import Hook, Patches

#: How vLLM splits layers whose pages differ in size; those that are left over are lost.
_SPLIT = "zip(*page_size_layers.values())"


def kv_cache_planning() -> ModuleType:
    """Where vLLM divides memory among layers: `kv_cache_utils` in 0.32, `kv_cache_planning` from 0.33 on."""
    names = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")
    return importlib.import_module(next(name for name in names if importlib.util.find_spec(name)))


def _install(patches: Patches) -> None:
    planning = kv_cache_planning()
    group = planning._get_packed_kv_cache_groups

    @wraps(group)
    def get_packed_kv_cache_groups(
        vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
    ) -> list[KVCacheGroupSpec] | None:
        groups = group(vllm_config, kv_cache_spec)
        has_antkv = any(isinstance(spec, RecencySpec) for spec in kv_cache_spec.values())
        return regrouped(groups, kv_cache_spec) if groups and has_antkv else groups

    patches.set(planning, "_get_packed_kv_cache_groups", get_packed_kv_cache_groups)


HOOK = Hook(
    name="groups",
    why="vLLM gives layers whose pages differ in size groups of their own, which leave most of their blocks empty",
    upstream="https://github.com/vllm-project/vllm/issues/42449",
    install=_install,
    superseded=lambda: _SPLIT not in inspect.getsource(kv_cache_planning()._get_packed_kv_cache_groups),
)
