"""A short soak and a short load test of a real server of the embedded model, its metrics, and how it stops.

The long ones: docs/load-testing.md.
"""

import importlib.util
import itertools
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from openai import OpenAI, Stream

from loadtest.api import client_options, completion, headers
from loadtest.run import run
from loadtest.scenario import Scenario
from loadtest.server import Server
from loadtest.soak import soak
from loadtest.stream import StreamReader
from loadtest.watch import metrics, wait_until_idle
from tests.patience import PATIENCE
from tests.places import ROOT
from tests.prefill_proxy import proxy
from tests.serving.embedded_server import MODEL_NAME, STORE, embedded_server

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("api_key")]

SOAK_MINUTES = 0.75
#: At first caches still fill up; a leaked request's pages would be far more.
MAX_SLOPE = 150.0


def test_a_soak_leaves_the_server_as_it_was(server):
    report = soak(server, SOAK_MINUTES)
    assert report.complaints(MAX_SLOPE) == [], report.model_dump_json(indent=2)


def spoil(folder: Path, is_over: threading.Event) -> None:
    """Cut files of a store short; now and then its folder is gone, or something that cannot be written to."""
    rng = random.Random(0)
    for number in itertools.count():
        if is_over.wait(0.5):
            return
        files = [path for path in folder.rglob("*") if path.is_file()]
        for file in rng.sample(files, len(files) // 3):
            with suppress(FileNotFoundError):
                os.truncate(file, file.stat().st_size // 2)
        if files and number % 3 == 0:
            folder.rename(folder.with_name(f"pages{number}"))
            # Unless the server was faster.
            with suppress(FileExistsError):
                folder.symlink_to("/dev/full")
                is_over.wait(0.5)
                folder.unlink()


def pause(pid: int, is_over: threading.Event) -> None:
    """Let a server stand still half of the time."""
    for number in itertools.cycle([signal.SIGSTOP, signal.SIGCONT]):
        os.killpg(pid, number)
        if is_over.wait(2):
            return os.killpg(pid, signal.SIGCONT)


def soak_beside(server, disturb, *arguments):
    """A soak while something else is done, which changes no answer."""
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb, *arguments, is_over)
        try:
            report = soak(server, SOAK_MINUTES)
        finally:
            is_over.set()
        disturbing.result(PATIENCE)
    assert report.complaints(MAX_SLOPE) == [], report.model_dump_json(indent=2)


@pytest.mark.release
def test_a_soak_behind_a_slow_prefill_server(shared_servers, tmp_path):
    decode = shared_servers.running(STORE)
    (tmp_path / "pages").symlink_to(decode.pages)
    with (
        embedded_server(tmp_path, STORE) as prefill,
        proxy(tmp_path / "proxy.log", prefill.url, decode.url, "--timeout=1") as url,
    ):
        soak_beside(Server(url, decode.pid), pause, prefill.pid)
        # Nor do prompts that were not waited for hold pages there.
        assert wait_until_idle(prefill.url, PATIENCE) == {}


def test_a_soak_with_a_store_that_is_spoilt(shared_servers):
    server = shared_servers.running(STORE)
    soak_beside(server, spoil, server.pages)
    assert any(server.pages.parent.glob("pages?*")), "nothing was spoilt"
    # It is used as before.
    prompt = list(range(50, 250))
    server.complete(prompt, 1)
    httpx.post(f"{server.url}/reset_prefix_cache", headers=headers(), timeout=PATIENCE).raise_for_status()
    before = metrics(server.url)["vllm:external_prefix_cache_hits_total"]
    server.complete(prompt, 1)
    assert metrics(server.url)["vllm:external_prefix_cache_hits_total"] == before + 128


def kill_under_load(other, is_over):
    """Let a server work, and end it in the midst of that."""

    def work(seed):
        rng = random.Random(seed)
        with suppress(httpx.HTTPError):
            while True:
                other.complete([rng.randrange(3, 4000) for _ in range(rng.randrange(130, 600))], 20)

    with ThreadPoolExecutor() as clients:
        for seed in range(3):
            clients.submit(work, seed)
        is_over.wait(SOAK_MINUTES * 30)
        os.killpg(other.pid, signal.SIGKILL)


@pytest.mark.release
def test_a_soak_beside_a_server_with_the_same_folder_that_is_killed(shared_servers, tmp_path):
    server = shared_servers.running(STORE)
    server.pages.mkdir(exist_ok=True)
    (tmp_path / "pages").symlink_to(server.pages)
    with embedded_server(tmp_path, STORE) as other:
        soak_beside(server, kill_under_load, other)
    assert server.get("/antkv/status").json()["engines"][0]["store"]["evictions"] > 0


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
    with OpenAI(**client_options(server.url)).post(
        request.path, cast_to=object, body=request.body, stream=True, stream_cls=Stream[object]
    ) as chunks:
        reader.feed(next(chunks), time.perf_counter())
        os.kill(server.pid, signal.SIGTERM)
        for chunk in chunks:
            reader.feed(chunk, time.perf_counter())
    reader.finish(time.perf_counter(), request.max_tokens)
