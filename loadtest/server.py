"""Context manager of a real `vllm serve` on the loopback interface."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx

EMBEDDED = Path(__file__).parents[1] / "models" / "embedded"
_START_SECONDS = 1800
_STOP_SECONDS = 60
_LOG_TAIL = 4000


class ServerError(Exception):
    """The server did not start."""


@dataclass(frozen=True)
class Server:
    """A running server. `pid` is its first process; the engine and its workers are children of it."""

    url: str
    pid: int


@contextmanager
def running_server(
    model: str,
    kv_cache_dtype: str,
    log: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """Serve a model; what the server prints goes to the file `log`.

    options: further arguments of `vllm serve`.
    environment: variables that are set unless the caller's environment has them.
    """
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-cache-dtype", kv_cache_dtype, *options]
    defaults = {"VLLM_NO_USAGE_STATS": "1", **environment}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=defaults | os.environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, process, log)
            yield Server(url, process.pid)
        finally:
            _stop(process)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    raise ServerError(f"vllm serve did not become healthy. The end of {log}:\n{log.read_text()[-_LOG_TAIL:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the server, then kill what is left of its session."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A free port of the loopback interface, below those from which the system takes one for each connection it makes.

    One of these might be taken before the server is so far, which takes seconds.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), k=100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise ServerError("No port is free.")
