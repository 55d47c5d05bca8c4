"""Lets layers that read the cache of another stand in a group of pages of several sizes.

vLLM puts such a layer into the group of the one whose cache it reads. In a group whose layers have pages of several
sizes, as ours always are, it then looks for the page of the layer itself, which there is none of.
"""

import functools
import inspect
from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_antkv.hooks.base import Hook
from vllm_antkv.hooks.patches import Patches
from vllm_antkv.presets import PRESETS


def _install(patches: Patches) -> None:
    original = WorkerWrapperBase.initialize_from_config

    @functools.wraps(original)
    def initialize_from_config(self: WorkerWrapperBase, kv_cache_configs: list[Any]) -> None:
        if self.vllm_config.cache_config.cache_dtype in PRESETS:
            layers = self.vllm_config.compilation_config.static_forward_context
            for kv_cache_config in kv_cache_configs:
                name_pages(kv_cache_config, layers)
        original(self, kv_cache_configs)

    patches.set(WorkerWrapperBase, "initialize_from_config", initialize_from_config)


def name_pages(kv_cache_config: KVCacheConfig, layers: dict[str, Any]) -> None:
    """Say of every layer without a cache of its own which pages it reads.

    layers: every layer by its name.
    """
    for name, layer in layers.items():
        target = layer.kv_sharing_target_layer_name if isinstance(layer, Attention) else None
        for group in kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs) and target in spec.kv_cache_specs:
                spec.kv_cache_specs[name] = spec.kv_cache_specs[target]


def _finds_them() -> bool:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return "shared_kv_cache_layers" in inspect.getsource(GPUModelRunner.initialize_attn_backend)


HOOK = Hook(
    name="kv_sharing",
    why="in a group of pages of several sizes, vLLM does not find those that a layer reads from another",
    upstream="https://github.com/vllm-project/vllm/pull/43533",
    install=_install,
    superseded=_finds_them,
)
