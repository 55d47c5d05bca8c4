"""A server that computes prompts and one that generates, behind `docker/prefill_proxy.py`, share a folder of pages."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.server import Start, free_port, running
from loadtest.watch import metrics
from tests.patience import PATIENCE, wait_for
from tests.serving.conftest import EMBEDDED, ROOT
from tests.serving.server import MODEL_NAME, PRESET, answer, process_serving

pytestmark = [pytest.mark.serving, pytest.mark.long]


def body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}


def stream(url: str, prompt: list[int], num_tokens: int) -> Iterator[str]:
    """A completion as it is made."""
    asked = {**body(prompt, num_tokens), "stream": True, "stream_options": {"include_usage": False}}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=PATIENCE) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def loaded_tokens(url: str) -> float:
    """Tokens whose pages a server has had from the folder."""
    return metrics(url)["vllm:external_prefix_cache_hits_total"]


@contextmanager
def proxy(log: Path, prefill: str, decode: str, *options: str) -> Iterator[str]:
    """The URL of one."""
    port = free_port()
    script = str(ROOT / "docker" / "prefill_proxy.py")
    command = [sys.executable, script, "--prefill", prefill, "--decode", decode, "--port", str(port), *options]
    with running(command, log, os.environ) as process:
        start = Start(PRESET, f"http://127.0.0.1:{port}", log, process, time.monotonic() + PATIENCE)
        wait_for(start.is_healthy)
        yield start.url


@pytest.fixture
def serve(tmp_path: Path) -> Callable[[str], Any]:
    """Starts a server in this role."""

    def started(role: str) -> Any:
        extra = {"folder": str(tmp_path / "pages")}
        transfer = {"kv_connector": "AntKVStore", "kv_role": role, "kv_connector_extra_config": extra}
        return process_serving(EMBEDDED, tmp_path / f"{role}.log", **{"--kv-transfer-config": json.dumps(transfer)})

    return started


def test_no_request_ends_with_the_prefill_server(
    serve: Callable[[str], Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    """Those that it computes then, and later ones, are computed by the decode server; what is refused says why."""
    some = prompts[-3:]
    others = [prompt[::-1] for prompt in some]
    with (
        serve("kv_producer") as prefill,
        serve("kv_consumer") as decode,
        proxy(tmp_path / "proxy.log", prefill.url, decode.url) as url,
    ):
        alone = ["".join(stream(prefill.url, prompt, 100)) for prompt in some]
        assert ["".join(stream(url, prompt, 100)) for prompt in some] == alone
        hits = loaded_tokens(decode.url)
        assert hits == sum((len(prompt) - 1) // 128 * 128 for prompt in some) > 0
        refused = httpx.post(f"{url}/v1/completions", json=body(some[0], 10_000), timeout=PATIENCE)
        assert refused.status_code == httpx.codes.BAD_REQUEST
        assert "max_model_len=1024" in refused.text

        streams = [stream(url, prompt, 100) for prompt in some]
        begun = [next(each) for each in streams]
        # It accepts requests, and computes none.
        os.killpg(prefill.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(len(others)) as clients:
            waiting = [clients.submit(answer, url, prompt) for prompt in others]
            # Of the decode server's own.
            assert [begin + "".join(rest) for begin, rest in zip(begun, streams, strict=True)] == alone
            with proxy(tmp_path / "impatient.log", prefill.url, decode.url, "--timeout=1") as impatient:
                assert answer(impatient, others[0][:100]) == answer(decode.url, others[0][:100])
            os.killpg(prefill.pid, signal.SIGKILL)
            answers = [each.result() for each in waiting]
        assert answers == [answer(decode.url, prompt) for prompt in others]
        assert answer(url, others[0][1:])
        assert loaded_tokens(decode.url) == hits
        os.killpg(decode.pid, signal.SIGKILL)
        gone = httpx.post(f"{url}/v1/completions", json=body(some[0], 5), timeout=PATIENCE)
        assert gone.status_code == httpx.codes.BAD_GATEWAY
        assert "decode server does not answer" in gone.json()["error"]["message"]
