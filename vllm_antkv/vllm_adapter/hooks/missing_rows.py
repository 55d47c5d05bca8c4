"""Ends requests with an error that lack rows, instead of serving what comes of it.

A row that a query sees unquantised may have no page only by a bug: of our block managers, or of a vLLM that sets
entries of block tables to null by rules that we do not know. Kernels notice, and workers say which requests it was
(`attention.missing_rows`).
"""

import logging
from functools import wraps
from itertools import chain
from typing import Any

import vllm
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from vllm_antkv.vllm_adapter.hooks.base import Hook, Patches
from vllm_antkv.vllm_adapter.step.missing_rows import FIELD

logger = logging.getLogger("vllm.antkv")

_NULL_BLOCK = 0


def _install(patches: Patches) -> None:
    original = Scheduler.update_from_output

    @wraps(original)
    def update_from_output(self: Scheduler, scheduler_output: Any, model_runner_output: ModelRunnerOutput) -> Any:
        # Of another cache dtype, no output has it.
        for request_id in getattr(model_runner_output, FIELD, ()):
            _end(self, request_id)
        return original(self, scheduler_output, model_runner_output)

    patches.set(Scheduler, "update_from_output", update_from_output)


def _end(scheduler: Scheduler, request_id: str) -> None:
    """Let vLLM end a request with an error when it has seen the step's output, and nobody share what it computed."""
    if request_id not in scheduler.requests:
        return
    logger.error(
        "Request %s ends with an error, as a row that it sees unquantised has no page: report this bug of vllm-antkv "
        "with vLLM %s, and serve with --kv-cache-dtype auto where it happens again.",
        request_id,
        vllm.__version__,
    )
    manager = scheduler.kv_cache_manager
    manager.evict_blocks(set(chain.from_iterable(manager.get_block_ids(request_id))) - {_NULL_BLOCK})
    # Requests that an encoder failed: what vLLM does with these is what is wanted here.
    scheduler.encoder_cache_mismatch_reqs.add(request_id)


HOOK = Hook(
    name="missing_rows",
    why="workers cannot tell the scheduler that a request went wrong, but for blocks that a KV connector loads",
    upstream="https://github.com/vllm-project/vllm/pull/19330",
    install=_install,
    superseded=lambda: any("fail" in name or "error" in name for name in ModelRunnerOutput.__dataclass_fields__),
)
