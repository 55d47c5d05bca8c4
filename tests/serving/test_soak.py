"""A short soak and a short load test of a real server of the embedded model, its metrics, and how it stops.

The long ones: docs/load-testing.md.
"""

import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from loadtest.api import completion, headers
from loadtest.run import run
from loadtest.scenario import Scenario
from loadtest.server import Server
from loadtest.soak import soak
from loadtest.stream import StreamReader
from tests.patience import PATIENCE
from tests.serving.embedded_server import API_KEY, MODEL_NAME, SharedServers

pytestmark = [pytest.mark.serving, pytest.mark.long]

ROOT = Path(__file__).parents[2]
SOAK_MINUTES = 0.75
#: At first caches still fill up; a leaked request's pages would be far more.
MAX_SLOPE = 150.0


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load tests send it."""
    monkeypatch.setenv("VLLM_API_KEY", API_KEY)


@pytest.fixture
def server(shared_servers: SharedServers) -> Server:
    return shared_servers.running()


def test_a_soak_leaves_the_server_as_it_was(server):
    report = soak(server, SOAK_MINUTES)
    assert report.complaints(MAX_SLOPE) == [], report.model_dump_json(indent=2)


def test_a_load_test_writes_its_reports(server, tmp_path):
    if importlib.util.find_spec("locust") is None:
        pytest.skip("locust is not installed: requirements/loadtest.lock has it")
    scenario = Scenario.load(ROOT / "loadtest" / "scenarios" / "embedded.yaml").model_dump(mode="json")
    traffic = {kind: {**one, "users": 1} for kind, one in scenario["traffic"].items() if kind in ("chat", "multi_turn")}
    path = tmp_path / "short.yaml"
    path.write_text(json.dumps({**scenario, "name": "short", "seconds": 10, "traffic": traffic}))
    summary = run(path, server.url, tmp_path / "out")
    assert summary.errors == []
    assert summary.total.requests >= 2
    assert set(summary.by_kind) <= {"chat", "multi_turn"}
    assert summary.total.time_to_first_token["p50"] > 0
    assert summary.total.between_tokens["p50"] > 0
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"summary.json", "requests.jsonl", "report.html", "locust.json", "locust_stats.csv"} <= written


def test_a_server_that_is_asked_to_stop_ends_its_answers(shared_servers):
    """As a pod of the Helm chart is."""
    server = shared_servers.to_be_ended()
    request = completion(MODEL_NAME, "Once upon a time", 400)
    reader = StreamReader(time.perf_counter())
    url = server.url + request.path
    with httpx.stream("POST", url, json=request.body, headers=headers(), timeout=PATIENCE) as response:
        lines = response.iter_lines()
        reader.feed(next(lines), time.perf_counter())
        os.kill(server.pid, signal.SIGTERM)
        for line in lines:
            reader.feed(line, time.perf_counter())
    reader.finish(time.perf_counter(), request.max_tokens)
