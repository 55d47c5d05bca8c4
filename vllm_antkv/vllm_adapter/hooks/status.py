"""Lets the API server ask an engine what its antkv cache is doing.

The API process, the engine core (which owns the block pool) and the workers (which own the counters and the pages) are
different processes. vLLM's utility calls run any method of the engine core between two steps: here it gets two more,
which ask the workers (`worker`). It also remembers its last requests, so that their anchors can be looked up.
"""

from dataclasses import dataclass, field
from functools import wraps
from itertools import chain
from typing import Any

from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.layer_windows import layer_windows
from vllm_antkv.ops.counters import Report, merged
from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.block_pool import managers
from vllm_antkv.vllm_adapter.block_pool.requests import LastRequests
from vllm_antkv.vllm_adapter.hooks.base import Hook, Patches
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan

#: Anchor rows in one answer of `antkv_anchors`, all layers and heads: a few hundred KB as JSON.
_MAX_ROWS = 65536
#: VQ blocks in one answer, at most: a map of 2048 tokens fits on a screen.
_MAX_BLOCKS = 16


def _install(patches: Patches) -> None:
    patches.set(EngineCore, "add_request", _remembering(EngineCore.add_request))
    patches.set(EngineCore, "antkv_status", _engine_status)
    patches.set(EngineCore, "antkv_anchors", _engine_anchors)


def _engine_status(self: EngineCore) -> dict[str, Any]:
    """Pages of the pool and reports of all workers, as plain values; see `vllm_antkv.vllm_adapter.server.status`."""
    from vllm_antkv.vllm_adapter.block_pool.managers import pages_in_use
    from vllm_antkv.vllm_adapter.block_pool.requests import tokens_in_use

    manager = self.scheduler.kv_cache_manager
    return {
        # Without the null block, which is never allocated.
        "pool_pages": manager.block_pool.num_gpu_blocks - 1,
        "pages_in_use": pages_in_use(manager),
        "tokens_in_use": tokens_in_use(self.scheduler),
        "num_layers": _num_layers(self) - len(engine_plan(self.vllm_config).exact),
        "workers": _reports(self),
        "store": _store_report(self),
    }


def _store_report(core: EngineCore) -> dict[str, Any] | None:
    """Of the KV connector `AntKVStore`; None without one."""
    from vllm_antkv.vllm_adapter.kv_transfer.store import AntKVStore

    connector = core.scheduler.get_kv_connector()
    stores = (each for each in getattr(connector, "sub_connectors", [connector]) if isinstance(each, AntKVStore))
    return next((store.report() for store in stores), None)


def _reports(core: EngineCore) -> list[Report]:
    """Of all workers, who are asked only if they can have done something since: vLLM's spin for a second after a call.

    What an engine without requests was told stays true until it gets one.
    """
    memory = _memory(core)
    at_work = core.scheduler.has_requests() or bool(core.batch_queue)
    if at_work or memory.reported_at != memory.requests.count:
        memory.reports = [merged(stages) for stages in _by_rank(core, core.collective_rpc("antkv_report"))]
        memory.reported_at = None if at_work else memory.requests.count
    return memory.reports


def _by_rank(core: EngineCore, answers: list[Any]) -> list[list[Any]]:
    """Answers of all workers, by tensor-parallel rank and stage of the pipeline."""
    num_ranks = core.vllm_config.parallel_config.tensor_parallel_size
    return [answers[rank::num_ranks] for rank in range(num_ranks)]


def _engine_anchors(self: EngineCore, prompt: int | None, first_block: int) -> dict[str, Any]:
    """The last requests, and the anchors of one of them, as plain values; see `vllm_antkv.vllm_adapter.server.anchors`.

    prompt: number of the request; None is the newest. first_block: where to begin; the answer's size is bounded.
    """
    closed = _memory(self).requests.closed_blocks(self.scheduler.kv_cache_manager)
    chosen = next((each for each in closed if prompt in (None, each.number)), None)
    answer: dict[str, Any] = {
        "prompts": [{"prompt": each.number, "blocks": each.num_blocks, "running": each.running} for each in closed],
        "map": None,
    }
    if chosen is not None:
        settings = engine_plan(self.vllm_config).settings
        first = min(first_block, chosen.num_blocks - 1)
        last = min(first + _window(self, settings), chosen.num_blocks)
        block_ids = {group: ids[first:last] for group, ids in chosen.block_ids.items()}
        workers = self.collective_rpc("antkv_anchor_offsets", args=(block_ids,))
        tokens = chosen.request.all_token_ids[first * VQ_BLOCK_SIZE : last * VQ_BLOCK_SIZE]
        answer["map"] = {
            "prompt": chosen.number,
            "first_block": first,
            "blocks": last - first,
            "token_ids": list(tokens) if settings.dashboard_text else None,
            "workers": [list(chain(*stages)) for stages in _by_rank(self, workers)],
        }
    return answer


def _window(core: EngineCore, settings: AntKVConfig) -> int:
    """VQ blocks in one answer."""
    heads = _num_layers(core) * core.vllm_config.model_config.get_total_num_kv_heads()
    rows_per_block = 2 * heads * max(settings.anchor_rows, 1)
    return max(1, min(_MAX_BLOCKS, _MAX_ROWS // rows_per_block))


def _num_layers(core: EngineCore) -> int:
    """Of the model, those that attend."""
    return len(layer_windows(core.vllm_config.model_config.hf_text_config))


def _remembering(add_request: Any) -> Any:
    @wraps(add_request)
    def remember_and_add(self: EngineCore, request: Request, *args: Any, **kwargs: Any) -> None:
        add_request(self, request, *args, **kwargs)
        if self.vllm_config.cache_config.cache_dtype in PRESETS:
            _memory(self).requests.add(request)
            managers.add_request(self.scheduler.kv_cache_manager, request)

    return remember_and_add


@dataclass
class _Memory:
    """What an engine core remembers.

    requests: the last ones.
    reports: what the workers said when they were asked last.
    reported_at: how many requests had come by then, if all of them had ended.
    """

    requests: LastRequests = field(default_factory=LastRequests)
    reports: list[Report] = field(default_factory=list)
    reported_at: int | None = None


def _memory(core: EngineCore) -> _Memory:
    memory: _Memory = vars(core).setdefault("antkv", _Memory())
    return memory


HOOK = Hook(
    name="status",
    why="stat logger plugins see vLLM's own statistics only, and nothing else carries a plugin's to the API server",
    upstream="https://github.com/vllm-project/vllm/pull/34161",
    install=_install,
    superseded=lambda: "extras" in SchedulerStats.__dataclass_fields__,
)
