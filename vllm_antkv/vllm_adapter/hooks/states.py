"""Lets layers with a state lie beside ours, and cuts prompts where their states belong.

vLLM makes blocks larger until a page of one layer holds a state. Pages of ours lie side by side in a block, which
`plan.blocks` has planned.

Between two parts of a prompt the state enters the prefix cache, as that of all tokens of its block. vLLM ends parts at
multiples of the smallest block of all layers, which is that of our recent rows: states would be taken for those of
tokens that they have not seen, without an error.

And where blocks of states are larger than those pages, it lets prefix-cache hits end within a block, where a block
of codes is not whole.
"""

import inspect
from collections.abc import Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms.interface import Platform
from vllm.v1.core import kv_cache_coordinator, kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec, iter_layer_specs

from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec
from vllm_antkv.vllm_adapter.hooks.base import Hook, Patches
from vllm_antkv.vllm_adapter.plan.blocks import set_block_size
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan

#: What vLLM cuts prompts by.
_GRID = "block_size = self.cache_config.block_size"


def _install(patches: Patches) -> None:
    align = Platform._align_hybrid_block_size.__func__
    initialise = Scheduler.__init__
    ends_within = kv_cache_utils.partial_hash_hits_enabled

    def align_hybrid_block_size(cls: type, vllm_config: VllmConfig, backend_cls: Any) -> None:
        if vllm_config.cache_config.cache_dtype in PRESETS:
            # Until the model was loaded, vLLM's own choice may have taken their place.
            set_block_size(vllm_config, engine_plan(vllm_config).blocks)
        else:
            align(cls, vllm_config, backend_cls)

    @wraps(initialise)
    def init(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if self.need_mamba_block_aligned_split and self.cache_config.cache_dtype in PRESETS:
            self.cache_config.block_size = _block_size_of_states(self.kv_cache_config, self.block_size)

    @wraps(ends_within)
    def partial_hash_hits_enabled(kv_cache_groups: Sequence[KVCacheGroupSpec], *args: Any, **kwargs: Any) -> bool:
        has_antkv = any(isinstance(spec, RecencySpec) for spec in _specs(kv_cache_groups))
        return not has_antkv and ends_within(kv_cache_groups, *args, **kwargs)

    for module in (kv_cache_utils, kv_cache_coordinator):
        patches.set(module, "partial_hash_hits_enabled", partial_hash_hits_enabled)
    patches.set(Platform, "_align_hybrid_block_size", classmethod(align_hybrid_block_size))
    patches.set(Scheduler, "__init__", init)


def _specs(groups: Sequence[KVCacheGroupSpec]) -> Iterator[KVCacheSpec]:
    return chain.from_iterable(iter_layer_specs(group.kv_cache_spec) for group in groups)


def _block_size_of_states(kv_cache_config: KVCacheConfig, scheduler_block_size: int) -> int:
    """Tokens of a block of states.

    Raises RuntimeError unless all have one size, at whose multiples prefix-cache hits end.
    """
    sizes = {spec.block_size for spec in _specs(kv_cache_config.kv_cache_groups) if isinstance(spec, MambaSpec)}
    if sizes != {scheduler_block_size}:
        raise RuntimeError(
            f"States have blocks of {sorted(sizes)} tokens, and prefix-cache hits end at multiples of "
            f"{scheduler_block_size}: wrong states would be shared."
        )
    return scheduler_block_size


HOOK = Hook(
    name="states",
    why="vLLM cuts prompts on the grid of the smallest blocks, and wrong states enter the prefix cache",
    upstream="https://github.com/vllm-project/vllm/pull/54076",
    install=_install,
    superseded=lambda: _GRID not in inspect.getsource(Scheduler._mamba_block_aligned_split),
)
