"""`kill -9` of a worker and of the engine core of a server that is generating.

Every client gets an error at once, no process stays behind, and the codebook is as it was.
"""

import hashlib
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from transformers import AutoConfig

from loadtest.api import headers
from loadtest.server import EMBEDDED, Server, running_server
from loadtest.watch import metrics
from tests.patience import PATIENCE
from tests.serving.embedded_server import API_KEY, MAX_MODEL_LEN, MODEL_NAME, PRESET, SharedServers
from vllm_antkv.codebook import ModelIdentity, find_codebook

pytestmark = pytest.mark.serving

OPTIONS = {
    "--dtype": "float32",
    "--max-model-len": str(MAX_MODEL_LEN),
    "--kv-cache-memory-bytes": str(1 << 27),
    "--served-model-name": MODEL_NAME,
    # On one device vLLM would run the worker inside the engine core.
    "--distributed-executor-backend": "mp",
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PROMPT = [0, *range(50, 100)]
ANSWERS = 4
#: So much to write that no answer is finished before its server is killed, however late the kill comes.
LONG = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 900, "n": ANSWERS, "ignore_eos": True}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """`headers` sends it."""
    monkeypatch.setenv("VLLM_API_KEY", API_KEY)


@contextmanager
def server_of_workers(log: Path) -> Iterator[Server]:
    arguments = ["--enforce-eager", *(part for pair in OPTIONS.items() for part in pair)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_PLUGINS", raising=False)
        # Other tests of this process may have asked for less.
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        with running_server(str(EMBEDDED), PRESET, log, arguments, ENVIRONMENT) as running:
            yield running


def whole_answer(running: Server) -> tuple[int, str]:
    """Status and message of a request that does not stream."""
    response = httpx.post(f"{running.url}/v1/completions", json=LONG, headers=headers(), timeout=PATIENCE)
    return response.status_code, response.json()["error"]["message"]


def streamed_answer(running: Server) -> str:
    """The error in the middle of a stream."""
    body, url = {**LONG, "stream": True}, f"{running.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers(), timeout=PATIENCE) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines()]
    errors = [json.loads(event)["error"] for event in events if event.startswith('{"error"')]
    assert len(errors) == 1, events[-5:]
    return str(errors[0]["message"])


def wait_until_all_run(running: Server, answers: int) -> None:
    """A request that comes after the kill would be refused in another way."""
    deadline = time.monotonic() + PATIENCE
    while metrics(running.url)["vllm:num_requests_running"] < answers:
        assert time.monotonic() < deadline, "not all requests run"
        time.sleep(0.05)


def assert_metrics_and_no_routes(running: Server, log: Path) -> None:
    """What a server shows that was started without VLLM_PLUGINS."""
    deadline = time.monotonic() + PATIENCE
    request = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 8}
    url = f"{running.url}/v1/completions"
    httpx.post(url, json=request, headers=headers(), timeout=PATIENCE).raise_for_status()
    while "vllm:antkv_tokens_stored_total" not in httpx.get(f"{running.url}/metrics", timeout=PATIENCE).text:
        assert time.monotonic() < deadline, "no metrics of the cache"
        time.sleep(0.5)
    for path in ("/antkv/", "/antkv/status", "/antkv/config", "/antkv/anchors"):
        assert httpx.get(running.url + path, timeout=PATIENCE).status_code == 404
    assert "VLLM_PLUGINS=antkv switches them on." in log.read_text()


def checksum(codebook: Path) -> str:
    return hashlib.sha256(codebook.read_bytes()).hexdigest()


def assert_taken_down_cleanly(running: Server, victim: str, codebook: Path) -> None:
    """By the death of one process."""
    before = checksum(codebook)
    with ThreadPoolExecutor() as pool:
        processes = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
        (doomed,) = [process for process in processes if process.name() == victim[:15] or victim in process.cmdline()]
        streams = [pool.submit(streamed_answer, running) for _ in range(2)]
        wholes = [pool.submit(whole_answer, running) for _ in range(2)]
        wait_until_all_run(running, ANSWERS * (len(streams) + len(wholes)))
        time.sleep(random.Random(victim).uniform(0, 0.5))
        doomed.kill()
        for stream in streams:
            assert "EngineCore" in stream.result(PATIENCE)
        for whole in wholes:
            status, message = whole.result(PATIENCE)
            assert status == 500
            assert "EngineCore" in message
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
        assert alive == []
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{running.url}/health", timeout=5)
    assert checksum(codebook) == before


def test_without_its_engine_core(shared_servers: SharedServers) -> None:
    server = shared_servers.to_be_ended()
    assert_taken_down_cleanly(server, "VLLM::EngineCore", server.codebook)


def test_without_its_worker(tmp_path: Path) -> None:
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(EMBEDDED))
    with server_of_workers(tmp_path / "server.log") as running:
        assert_metrics_and_no_routes(running, tmp_path / "server.log")
        assert_taken_down_cleanly(running, "VLLM::Worker", find_codebook(str(EMBEDDED), identity, PRESET))
