"""The endpoint plugin without an engine: who may ask, what is answered, and who publishes metrics."""

import asyncio
import threading
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY
from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.patience import PATIENCE
from tests.unit.vllm_adapter.server.test_metrics import SETUP, answer, report
from vllm_antkv.plugin import register
from vllm_antkv.vllm_adapter.server import publisher, routes
from vllm_antkv.vllm_adapter.server.publisher import AntKVMetrics
from vllm_antkv.vllm_adapter.server.routes import PREFIX, STATUS_PATH, AntKVEndpoints
from vllm_antkv.vllm_adapter.server.status import Setup


class EngineClient:
    """What the plugin uses of vLLM's AsyncLLM. Two engines, which die after `lives` answers; `failures` are none."""

    def __init__(self, cache_dtype: str, api_server: int = 0, lives: int = 3, failures: tuple[int, ...] = ()) -> None:
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            model_config=SimpleNamespace(served_model_name="model", get_total_num_kv_heads=lambda: 1),
            parallel_config=SimpleNamespace(_api_process_rank=api_server),
        )
        self.engine_core = SimpleNamespace(engine_ranks_managed=[0, 1], call_utility_all_async=self._call)
        self.asked = 0
        self._lives, self._failures = lives, failures
        self.map: dict[str, Any] | None = None
        self.threads: dict[str, int] = {}

    def get_tokenizer(self) -> "EngineClient":
        return self

    def decode(self, token_ids: list[int]) -> str:
        self.threads["tokenizer"] = threading.get_ident()
        return str(token_ids)

    async def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        if method == "antkv_anchors":
            self.anchors_asked = args
            self.threads["requests"] = threading.get_ident()
            return [{"prompts": [], "map": self.map}] * 2
        assert method == "antkv_status"
        if self.asked == self._lives:
            raise EngineDeadError()
        self.asked += 1
        if self.asked in self._failures:
            raise ValueError("no answer")
        return [answer(report(10 * self.asked), vq=self.asked)] * 2


def client(api_keys: list[str] | None, cache_dtype: str = "auto") -> TestClient:
    app = FastAPI()
    app.state.args = Namespace(api_key=api_keys, disable_log_stats=False)
    plugin = AntKVEndpoints()
    plugin.attach_router(app)
    engine: Any = EngineClient(cache_dtype)
    asyncio.run(plugin.init_state(engine, app.state, app.state.args))
    return TestClient(app)


def get(server: TestClient, authorisation: str | None = None, path: str = STATUS_PATH) -> int:
    headers = {} if authorisation is None else {"Authorization": authorisation}
    return server.get(path, headers=headers).status_code


#: Routes that answer with data, and the files of the page.
DATA = [f"{PREFIX}/{name}" for name in ("status", "config", "anchors")]
FILES = [f"{PREFIX}/{name}" for name in ("", "dashboard.css", "dashboard.js")]


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("named", "tasks", "loaded"),
    [
        (None, ("generate",), [AntKVMetrics]),
        (None, ("embed",), []),
        (None, None, []),
        ("antkv", ("generate",), [AntKVEndpoints]),
        ("another", ("generate",), []),
        ("", ("generate",), []),
    ],
)
def test_without_the_opt_in_vllm_loads_the_metrics_and_no_route(monkeypatch, named, tasks, loaded):
    register()
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    app = FastAPI()
    app.state.args = Namespace(api_key=None)
    before = list(app.routes)
    attach_endpoint_plugins(app, tasks)
    assert [type(each) for each in app.state.endpoint_plugins] == loaded
    assert (app.routes != before) == (AntKVEndpoints in loaded)


@pytest.mark.parametrize("path", DATA)
def test_another_cache_dtype_is_inactive(path):
    response = client(None, "fp8").get(path)
    assert response.status_code == 200
    assert response.json() == {"active": False, "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("path", DATA)
@pytest.mark.parametrize("authorisation", [None, "Bearer wrong", "Bearer", "Basic one", "one", "Bearer ONE"])
def test_with_api_keys_others_may_not_ask(authorisation, path):
    assert get(client(["one", "two"]), authorisation, path) == 401


def test_a_request_without_a_key_learns_nothing_of_its_mistakes():
    assert get(client(["one"]), None, f"{PREFIX}/anchors?prompt=x") == 401


@pytest.mark.parametrize("path", FILES)
def test_the_page_itself_needs_no_key_and_may_load_nothing_from_elsewhere(path):
    response = client(["one"]).get(path)
    assert response.status_code == 200
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in response.text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("name", ["..%2froutes.py", "../routes.py", "index.html", "dashboard.js/"])
def test_nothing_else_of_the_folder_is_served(name):
    assert client(None).get(f"{PREFIX}/{name}", follow_redirects=False).status_code in (307, 404)


@pytest.mark.parametrize("query", ["prompt=0", "prompt=x", "engine=-1", "block=-1", "block=9999999999"])
def test_anchors_of_nothing_that_can_be_are_refused(query):
    assert get(client(None), path=f"{PREFIX}/anchors?{query}") == 422


def test_the_api_key_may_be_in_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    server = client(None)
    assert get(server) == 401
    assert get(server, "Bearer secret") == 200


@pytest.fixture
def fast(monkeypatch) -> Iterator[None]:
    """Metrics without waiting, of a setup that needs no model."""
    monkeypatch.setattr(publisher, "_REFRESH_SECONDS", 0)
    monkeypatch.setattr(Setup, "of", lambda vllm_config: SETUP)
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def publish(engine: EngineClient, disable_log_stats: bool = False, plugin: Any = AntKVEndpoints) -> bool:
    """Start the plugin and let it publish until the engines die; whether it publishes at all."""

    async def run() -> bool:
        app = FastAPI()
        args = Namespace(api_key=None, disable_log_stats=disable_log_stats)
        client: Any = engine
        await plugin().init_state(client, app.state, args)
        publisher = getattr(app.state, "antkv_publisher", None)
        if publisher is not None:
            await asyncio.wait_for(publisher, timeout=PATIENCE)
        return publisher is not None

    return asyncio.run(run())


@pytest.fixture
def served(fast) -> tuple[TestClient, Any]:
    """A server of an antkv cache, and its engines."""
    app = FastAPI()
    app.state.args = Namespace(api_key=None)
    AntKVEndpoints().attach_router(app)
    engine: Any = EngineClient("antkv-1bit")
    app.state.antkv_source = routes.StatusSource(publisher.Engines(engine))
    return TestClient(app), engine


def test_status_of_an_antkv_cache_names_every_engine(served):
    server, engine = served
    status = server.get(STATUS_PATH).json()
    assert status["active"] is True
    assert status["settings"] == SETUP.settings.model_dump()
    assert [each["engine"] for each in status["engines"]] == [0, 1]
    anchors = server.get(f"{PREFIX}/anchors?engine=1&prompt=7&block=3").json()
    assert anchors == {"prompts": [], "map": None}
    assert engine.anchors_asked == (7, 3)


def test_text_of_anchors_does_not_keep_requests_waiting(served):
    server, engine = served
    engine.map = {"prompt": 1, "first_block": 0, "blocks": 1, "token_ids": [5, 6], "workers": [[[[[[0], [1]]]]]]}
    anchors = server.get(f"{PREFIX}/anchors").json()
    assert anchors["map"]["text"] == ["[5]", "[6]"]
    assert engine.threads["tokenizer"] != engine.threads["requests"]


def test_metrics_go_on_after_a_failure_which_is_said_once(fast, said):
    assert publish(EngineClient("antkv-1bit", lives=4, failures=(1, 3)))
    assert sum("metrics were not updated" in line for line in said) == 1
    labels = {"model_name": "model", "engine": "0"}
    assert REGISTRY.get_sample_value("vllm:antkv_tokens_stored_total", labels) == 40


@pytest.mark.parametrize("plugin", [AntKVEndpoints, AntKVMetrics])
def test_metrics_are_published_until_the_engines_die(fast, plugin, said):
    engine = EngineClient("antkv-1bit", lives=3)
    assert publish(engine, plugin=plugin)
    assert engine.asked == 3
    # Whoever has no routes is told how to get them.
    assert any("VLLM_PLUGINS=antkv" in line for line in said) == (plugin is AntKVMetrics)
    for rank in ("0", "1"):
        labels = {"model_name": "model", "engine": rank}
        assert REGISTRY.get_sample_value("vllm:antkv_tokens_stored_total", labels) == 30
        assert REGISTRY.get_sample_value("vllm:antkv_pages_in_use", {**labels, "page": "vq"}) == 3


@pytest.mark.parametrize(
    "engine, disable_log_stats",
    [
        (EngineClient("auto"), False),
        (EngineClient("antkv-1bit"), True),
        (EngineClient("antkv-1bit", api_server=1), False),
    ],
    ids=["another cache dtype", "--disable-log-stats", "second API server"],
)
def test_metrics_are_not_published_for(fast, engine, disable_log_stats):
    assert not publish(engine, disable_log_stats)
    assert engine.asked == 0
    assert REGISTRY.get_sample_value("vllm:antkv_nominal_bits", {"model_name": "model", "engine": "0"}) is None
