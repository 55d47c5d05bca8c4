"""Queries of an API server to its engines, and the metrics that are updated from the answers.

vLLM loads endpoint plugins only if VLLM_PLUGINS names them, because they add routes. `AntKVMetrics` adds none, so
`hooks.metrics` loads it anyway; `/metrics` is vLLM's own route.
"""

import asyncio
import logging
from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.config import VllmConfig
from vllm.tasks import SupportedTask
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.server.metrics import Metrics
from vllm_antkv.vllm_adapter.server.status import EngineStatus, Setup

logger = logging.getLogger("vllm.antkv")

#: Seconds between updates; Prometheus usually scrapes every 15 seconds or more.
_REFRESH_SECONDS = 5.0


class Engines:
    """The engines of one server. Its setup is None when the server runs with another cache dtype."""

    def __init__(self, engine_client: AsyncLLM) -> None:
        self.client = engine_client
        self.vllm_config: VllmConfig = engine_client.vllm_config
        active = self.vllm_config.cache_config.cache_dtype in PRESETS
        self.setup = Setup.of(self.vllm_config) if active else None

    async def status(self) -> list[EngineStatus]:
        """Ask all engines of this server; they answer between two steps."""
        return [EngineStatus.of(*pair) for pair in (await self.ask("antkv_status")).items()]

    async def ask(self, method: str, *args: Any) -> dict[int, dict[str, Any]]:
        """The answer of every engine to a utility call, by rank."""
        core = self.client.engine_core
        answers = await core.call_utility_all_async(method, *args)
        return dict(zip(core.engine_ranks_managed, answers, strict=True))

    @property
    def first(self) -> bool:
        """Whether this is the first API server, which does what must be done once for all of them."""
        return bool(self.vllm_config.parallel_config._api_process_rank == 0)


class AntKVMetrics:
    """An endpoint plugin without routes: the metrics alone."""

    name = "antkv"
    required_tasks: tuple[SupportedTask, ...] = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds no route."""

    async def init_state(self, engine_client: AsyncLLM, state: State, args: Namespace) -> None:
        """Start publishing, and log how the routes are switched on."""
        engines = Engines(engine_client)
        start_publishing(engines, state, args)
        if engines.setup is not None and engines.first:
            logger.info(
                "The dashboard and the other routes under /antkv/ are off: VLLM_PLUGINS=antkv switches them on."
            )


def start_publishing(engines: Engines, state: State, args: Namespace) -> None:
    """Publish metrics where vLLM publishes its own."""
    # Prometheus adds up counters of several processes, so only one API server may publish.
    if engines.setup is not None and engines.first and not args.disable_log_stats:
        state.antkv_publisher = asyncio.create_task(_publish(engines))


async def _publish(engines: Engines) -> None:
    """Keep the metrics up to date until the server stops."""
    assert engines.setup is not None
    metrics = Metrics(engines.setup, engines.vllm_config.model_config.served_model_name)
    has_failed = False
    while True:
        try:
            metrics.update(await engines.status())
        except EngineDeadError:
            # vLLM logs this and stops the server.
            return
        except Exception:
            if not has_failed:
                logger.exception("The antkv metrics were not updated; this is tried again, and not said again.")
            has_failed = True
        await asyncio.sleep(_REFRESH_SECONDS)
