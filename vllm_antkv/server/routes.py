"""vLLM's endpoint plugin: the routes under `/antkv/`, and metrics that are kept up to date while the server runs.

vLLM loads it only when VLLM_PLUGINS names `antkv`.
"""

import asyncio
import logging
from argparse import Namespace
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import State
from vllm import envs
from vllm.config import VllmConfig
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.tasks import SupportedTask
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_antkv.presets import PRESETS
from vllm_antkv.server.anchors import Anchors
from vllm_antkv.server.config import Config
from vllm_antkv.server.metrics import Metrics
from vllm_antkv.server.page import add_page
from vllm_antkv.server.status import EngineStatus, Inactive, Setup, Status

logger = logging.getLogger("vllm.antkv")

PREFIX = "/antkv"
STATUS_PATH = PREFIX + "/status"
#: Age that metrics may have; Prometheus usually scrapes every 15 seconds or more.
_REFRESH_SECONDS = 5.0


class StatusSource:
    """Answers for one server. Its setup is None when the server runs with another cache dtype."""

    def __init__(self, engine_client: AsyncLLM) -> None:
        self._client = engine_client
        self.vllm_config: VllmConfig = engine_client.vllm_config
        active = self.vllm_config.cache_config.cache_dtype in PRESETS
        self.setup = Setup.of(self.vllm_config) if active else None

    @property
    def inactive(self) -> Inactive:
        """What is answered with another cache dtype."""
        return Inactive(kv_cache_dtype=self.vllm_config.cache_config.cache_dtype)

    async def engines(self) -> list[EngineStatus]:
        """Ask all engines of this server; they answer between two steps."""
        return [EngineStatus.of(*pair) for pair in (await self._ask("antkv_status")).items()]

    async def status(self) -> Status | Inactive:
        """The answer of `GET /antkv/status`."""
        if self.setup is None:
            return self.inactive
        return Status(**dict(self.setup), engines=await self.engines())

    def config(self) -> Config | Inactive:
        """The answer of `GET /antkv/config`."""
        return self.inactive if self.setup is None else Config.of(self.vllm_config)

    async def anchors(self, engine: int | None, prompt: int | None, block: int) -> Anchors | Inactive:
        """The answer of `GET /antkv/anchors`."""
        if self.setup is None:
            return self.inactive
        answers = await self._ask("antkv_anchors", prompt, block)
        num_kv_heads = self.vllm_config.model_config.get_total_num_kv_heads()
        return Anchors.of(answers, engine, num_kv_heads, lambda ids: self._client.get_tokenizer().decode(ids))

    async def _ask(self, method: str, *args: Any) -> dict[int, dict[str, Any]]:
        core = self._client.engine_core
        answers = await core.call_utility_all_async(method, *args)
        return dict(zip(core.engine_ranks_managed, answers, strict=True))


class GuardedRoute(APIRoute):
    """A route that wants one of the server's API keys, as vLLM's own do, before it looks at anything else.

    vLLM's middleware guards a fixed list of paths; its check of a request can be used all the same.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Put the check in front of the handler."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            guard: AuthenticationMiddleware | None = request.app.state.antkv_guard
            if guard is not None and not guard.verify_token(request.headers):
                return JSONResponse(content={"error": "Unauthorized"}, status_code=401)
            return await handle(request)

        return guarded


data_router = APIRouter(prefix=PREFIX, route_class=GuardedRoute)


@data_router.get("/status")
async def get_status(request: Request) -> Status | Inactive:
    """How the antkv cache is set up, and what it has done so far."""
    return await _source(request).status()


@data_router.get("/config")
async def get_config(request: Request) -> Config | Inactive:
    """The settings in effect."""
    return _source(request).config()


@data_router.get("/anchors")
async def get_anchors(
    request: Request,
    engine: Annotated[int | None, Query(ge=0, description="Data-parallel rank.")] = None,
    prompt: Annotated[int | None, Query(ge=1, description="Number of the prompt; the newest without it.")] = None,
    block: Annotated[int, Query(ge=0, le=2**31, description="First VQ block to show.")] = 0,
) -> Anchors | Inactive:
    """Which tokens of one of the last prompts are anchors, by layer and KV head."""
    return await _source(request).anchors(engine, prompt, block)


class AntKVEndpoints:
    """The endpoint plugin."""

    name = "antkv"
    required_tasks: tuple[SupportedTask, ...] = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; those that answer with data are guarded like vLLM's own by the server's API keys."""
        tokens = [key for key in (app.state.args.api_key or [envs.VLLM_API_KEY]) if key]
        app.state.antkv_guard = AuthenticationMiddleware(app, tokens) if tokens else None
        page = APIRouter(prefix=PREFIX)
        add_page(page)
        app.include_router(data_router)
        app.include_router(page)

    async def init_state(self, engine_client: AsyncLLM, state: State, args: Namespace) -> None:
        """Keep what the routes need, and start to publish metrics where vLLM publishes its own."""
        source = StatusSource(engine_client)
        state.antkv_source = source
        # Counters of several processes are added up: one of the API servers has to do it.
        first = source.vllm_config.parallel_config._api_process_rank == 0
        if source.setup is not None and first and not args.disable_log_stats:
            state.antkv_publisher = asyncio.create_task(_publish(source))


def _source(request: Request) -> StatusSource:
    return request.app.state.antkv_source


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
