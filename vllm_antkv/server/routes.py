"""vLLM's endpoint plugin: `GET /antkv/status`, and metrics that are kept up to date while the server runs.

vLLM loads it only when VLLM_PLUGINS names `antkv`.
"""

import asyncio
import logging
from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from vllm import envs
from vllm.config import VllmConfig
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.tasks import SupportedTask
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_antkv.presets import PRESETS
from vllm_antkv.server.metrics import Metrics
from vllm_antkv.server.status import EngineStatus, Inactive, Setup, Status

logger = logging.getLogger("vllm.antkv")

STATUS_PATH = "/antkv/status"
#: Age that metrics may have; Prometheus usually scrapes every 15 seconds or more.
_REFRESH_SECONDS = 5.0


class StatusSource:
    """Answers for one server. Its setup is None when the server runs with another cache dtype."""

    def __init__(self, engine_client: AsyncLLM) -> None:
        self._client = engine_client
        self.vllm_config: VllmConfig = engine_client.vllm_config
        active = self.vllm_config.cache_config.cache_dtype in PRESETS
        self.setup = Setup.of(self.vllm_config) if active else None

    async def engines(self) -> list[EngineStatus]:
        """Ask all engines of this server; they answer between two steps."""
        core = self._client.engine_core
        answers: list[dict[str, Any]] = await core.call_utility_all_async("antkv_status")
        return [EngineStatus.of(*pair) for pair in zip(core.engine_ranks_managed, answers, strict=True)]

    async def status(self) -> Status | Inactive:
        """The answer of `GET /antkv/status`."""
        if self.setup is None:
            return Inactive(kv_cache_dtype=self.vllm_config.cache_config.cache_dtype)
        return Status(**dict(self.setup), engines=await self.engines())


class AntKVEndpoints:
    """The endpoint plugin."""

    name = "antkv"
    required_tasks: tuple[SupportedTask, ...] = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route, guarded like vLLM's own by the server's API keys."""
        app.add_api_route(STATUS_PATH, _get_status, methods=["GET"], response_model=Status | Inactive)
        # vLLM's middleware guards a fixed list of paths; its check of a request can be used all the same.
        tokens = [key for key in (app.state.args.api_key or [envs.VLLM_API_KEY]) if key]
        app.state.antkv_guard = AuthenticationMiddleware(app, tokens) if tokens else None

    async def init_state(self, engine_client: AsyncLLM, state: State, args: Namespace) -> None:
        """Keep what the route needs, and start to publish metrics where vLLM publishes its own."""
        source = StatusSource(engine_client)
        state.antkv_source = source
        # Counters of several processes are added up: one of the API servers has to do it.
        first = source.vllm_config.parallel_config._api_process_rank == 0
        if source.setup is not None and first and not args.disable_log_stats:
            state.antkv_publisher = asyncio.create_task(_publish(source))


async def _get_status(request: Request) -> Response | Status | Inactive:
    """How the antkv cache is set up, and what it has done so far."""
    guard: AuthenticationMiddleware | None = request.app.state.antkv_guard
    if guard is not None and not guard.verify_token(request.headers):
        return JSONResponse(content={"error": "Unauthorized"}, status_code=401)
    source: StatusSource = request.app.state.antkv_source
    return await source.status()


async def _publish(source: StatusSource) -> None:
    """Keep the metrics up to date until the server stops."""
    assert source.setup is not None
    metrics = Metrics(source.setup, source.vllm_config.model_config.served_model_name)
    try:
        while True:
            metrics.update(await source.engines())
            await asyncio.sleep(_REFRESH_SECONDS)
    except EngineDeadError:
        # vLLM says so itself, and stops the server.
        return
    except Exception:
        logger.exception("The antkv metrics are no longer updated.")
