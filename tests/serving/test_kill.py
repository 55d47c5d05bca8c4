"""`kill -9` of a worker and of the engine core of a server that is generating.

Every client gets an error at once, no process stays behind, and the codebook is as it was.
"""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from loadtest.api import headers
from loadtest.server import Server
from loadtest.watch import metrics
from tests.patience import PATIENCE, wait_for
from tests.serving.embedded_server import EXACT, MODEL_NAME

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("api_key")]

PROMPT = [0, *range(50, 100)]
ANSWERS = 8
#: So much to write that no answer is finished before its server is killed, however late the kill comes.
LONG = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 900, "n": ANSWERS, "ignore_eos": True}


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


def wait_until_all_are_there(running: Server, answers: int) -> None:
    """A request that comes after the kill would be refused in another way."""
    there = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    wait_for(lambda: sum(metrics(running.url)[name] for name in there) >= answers)


@pytest.mark.parametrize(("kind", "victim"), [("default", "VLLM::EngineCore"), (EXACT, "VLLM::Worker")])
def test_a_killed_process_takes_the_server_down_cleanly(shared_servers, kind, victim):
    server = shared_servers.to_be_ended(kind)
    codebook = server.codebook.read_bytes()
    with ThreadPoolExecutor() as pool:
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        (doomed,) = [process for process in processes if process.name() == victim[:15] or victim in process.cmdline()]
        streams = [pool.submit(streamed_answer, server) for _ in range(2)]
        wholes = [pool.submit(whole_answer, server) for _ in range(2)]
        wait_until_all_are_there(server, ANSWERS * (len(streams) + len(wholes)))
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
            httpx.get(f"{server.url}/health", timeout=5)
    assert server.codebook.read_bytes() == codebook
