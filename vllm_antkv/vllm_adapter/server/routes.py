"""vLLM's endpoint plugin: the routes under `/antkv/`, and the metrics.

vLLM loads it only when VLLM_PLUGINS names `antkv`.
"""

import asyncio
from argparse import Namespace
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.datastructures import State
from vllm import envs
from vllm.config import VllmConfig
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.tasks import SupportedTask
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan
from vllm_antkv.vllm_adapter.server.anchors import Anchors
from vllm_antkv.vllm_adapter.server.publisher import Engines, start_publishing
from vllm_antkv.vllm_adapter.server.status import Inactive, Status

PREFIX = "/antkv"
STATUS_PATH = PREFIX + "/status"
_FOLDER = Path(__file__).parent / "dashboard"
#: Of the dashboard: path under the router, file, media type.
_FILES = (
    ("/", "index.html", "text/html; charset=utf-8"),
    ("/dashboard.css", "dashboard.css", "text/css; charset=utf-8"),
    ("/dashboard.js", "dashboard.js", "text/javascript; charset=utf-8"),
)
_HEADERS = {
    # Injected content could load, run and send nothing.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Config(BaseModel, frozen=True):
    """The configuration of a server with an antkv cache."""

    active: Literal[True] = True
    model: str = Field(description="The name that clients use.")
    kv_cache_dtype: str
    settings: AntKVConfig
    block_size: int = Field(description="Tokens per VQ block.")
    anchor_rows: int = Field(
        description="Anchor slots of K, and as many of V, per VQ block and KV head; an unquantised anchor takes two."
    )
    codebook: str = Field(description="The file that is served.")
    engine: dict[str, Any] = Field(description="Options of vLLM that the cache depends on.")

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        """Read it from the configuration of a server with an antkv cache."""
        plan = engine_plan(vllm_config)
        cache, model = vllm_config.cache_config, vllm_config.model_config
        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        return cls(
            model=model.served_model_name,
            kv_cache_dtype=cache.cache_dtype,
            settings=plan.settings,
            block_size=VQ_BLOCK_SIZE,
            anchor_rows=plan.settings.anchor_rows,
            codebook=plan.codebook.path,
            engine={
                "dtype": str(model.dtype).removeprefix("torch."),
                "max_model_len": model.max_model_len,
                "max_num_seqs": scheduler.max_num_seqs,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "enable_prefix_caching": cache.enable_prefix_caching,
                "prefix_cache_retention_interval": cache.prefix_cache_retention_interval,
                "tensor_parallel_size": parallel.tensor_parallel_size,
                "data_parallel_size": parallel.data_parallel_size,
            },
        )


class StatusSource:
    """Answers of the routes, for one server."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._reading = asyncio.Lock()

    @property
    def inactive(self) -> Inactive:
        """The answer with another cache dtype."""
        return Inactive(kv_cache_dtype=self._engines.vllm_config.cache_config.cache_dtype)

    async def status(self) -> Status | Inactive:
        """The answer of `GET /antkv/status`."""
        if self._engines.setup is None:
            return self.inactive
        return Status(**dict(self._engines.setup), engines=await self._engines.status())

    def config(self) -> Config | Inactive:
        """The answer of `GET /antkv/config`."""
        return self.inactive if self._engines.setup is None else Config.of(self._engines.vllm_config)

    async def anchors(self, engine: int | None, prompt: int | None, block: int) -> Anchors | Inactive:
        """The answer of `GET /antkv/anchors`."""
        if self._engines.setup is None:
            return self.inactive
        answers = await self._engines.ask("antkv_anchors", prompt, block)
        num_kv_heads = self._engines.vllm_config.model_config.get_total_num_kv_heads()
        # Text is a call of the tokenizer for each of thousands of tokens: no request waits for it. One thread at most.
        async with self._reading:
            return await asyncio.to_thread(Anchors.of, answers, engine, num_kv_heads, self._text)

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._engines.client.get_tokenizer().decode(token_ids)
        return text


class GuardedRoute(APIRoute):
    """A route that requires one of the server's API keys, as vLLM's own routes do.

    vLLM's middleware guards a fixed list of paths only; its token check is reused here.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Check the key before the handler runs."""
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
    """How the antkv cache is set up, and its counters."""
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


def _page() -> APIRouter:
    """The dashboard: files without data, whose scripts query the routes above with the visitor's API key.

    They are read once, so no request path ever reaches the file system.
    """
    router = APIRouter(prefix=PREFIX)
    for path, name, media_type in _FILES:
        router.add_api_route(path, _serve((_FOLDER / name).read_bytes(), media_type), include_in_schema=False)
    return router


def _serve(content: bytes, media_type: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return file


class AntKVEndpoints:
    """The endpoint plugin."""

    name = "antkv"
    required_tasks: tuple[SupportedTask, ...] = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; those with data require the server's API key."""
        tokens = [key for key in (app.state.args.api_key or [envs.VLLM_API_KEY]) if key]
        app.state.antkv_guard = AuthenticationMiddleware(app, tokens) if tokens else None
        app.include_router(data_router)
        app.include_router(_page())

    async def init_state(self, engine_client: AsyncLLM, state: State, args: Namespace) -> None:
        """Store what the routes need, and start publishing metrics where vLLM publishes its own."""
        engines = Engines(engine_client)
        state.antkv_source = StatusSource(engines)
        start_publishing(engines, state, args)


def _source(request: Request) -> StatusSource:
    return request.app.state.antkv_source
