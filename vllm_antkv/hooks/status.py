"""Lets the API server ask an engine what its antkv cache is doing.

The API process, the engine core (which owns the block pool) and the workers (which own the counters) are different
processes. vLLM's utility calls run any method of the engine core between two steps, its `collective_rpc` any method of
the worker wrapper: here both classes get one method more.
"""

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_antkv.hooks.base import Hook, missing_attributes
from vllm_antkv.ops.counters import Report


def _install() -> None:
    EngineCore.antkv_status = _engine_status  # type: ignore[attr-defined]
    WorkerWrapperBase.antkv_report = _worker_report  # type: ignore[attr-defined]


def _engine_status(self: EngineCore) -> dict:
    """Pages of the pool and reports of all workers, as plain values; see `vllm_antkv.server.engines`."""
    from vllm_antkv.cache.managers import pages_in_use

    manager = self.scheduler.kv_cache_manager
    return {
        # Without the null block, which is never allocated.
        "pool_pages": manager.block_pool.num_gpu_blocks - 1,
        "pages_in_use": pages_in_use(manager),
        "workers": self.collective_rpc("antkv_report"),
    }


def _worker_report(self: WorkerWrapperBase) -> Report:
    return self.antkv_counters.report()


HOOK = Hook(
    name="status",
    why="stat logger plugins see vLLM's own statistics only, and nothing else carries a plugin's to the API server",
    upstream="https://github.com/vllm-project/vllm/pull/34161",
    install=_install,
    missing=lambda: (
        missing_attributes(EngineCore, "collective_rpc")
        or missing_attributes(AsyncMPClient, "call_utility_all_async")
        or missing_attributes(KVCacheManager, "free")
        or missing_attributes(WorkerWrapperBase, "__getattr__")
    ),
    superseded=lambda: "extras" in SchedulerStats.__dataclass_fields__,
)
