"""Context managers of a real `vllm serve` on the loopback interface."""

import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx

EMBEDDED = Path(__file__).parents[1] / "models" / "embedded"
_START_SECONDS = 900
_STOP_SECONDS = 60


class ServerError(Exception):
    """The server did not start."""


@dataclass(frozen=True)
class Server:
    """A running server. `pid` is its first process; the engine and its workers are children of it."""

    url: str
    pid: int


@dataclass(frozen=True)
class Start:
    """A server that was started, and may not listen yet."""

    kv_cache_dtype: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    deadline: float

    def is_healthy(self) -> bool:
        """Whether it answers; ServerError when it ended, or takes longer than any server."""
        with suppress(httpx.TransportError):
            if httpx.get(f"{self.url}/health", timeout=5).status_code == httpx.codes.OK:
                return True
        if self.process.poll() is not None or time.monotonic() > self.deadline:
            raise ServerError(f"vllm serve did not become healthy. The end of {self.log}:\n{tail(self.log)}")
        return False


@contextmanager
def starting_server(
    model: str,
    kv_cache_dtype: str,
    log: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    port: int = 0,
) -> Iterator[Start]:
    """Serve a model as long as this is open; what the server prints goes to the file `log`.

    options: further arguments of `vllm serve`.
    environment: variables that are set unless the caller's environment has them.
    port: 0 for a free one.
    """
    port = port or free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-cache-dtype", kv_cache_dtype, *options]
    with running(command, log, {"VLLM_NO_USAGE_STATS": "1", **environment} | os.environ) as process:
        yield Start(kv_cache_dtype, f"http://127.0.0.1:{port}", log, process, time.monotonic() + _START_SECONDS)


@contextmanager
def running_server(
    model: str,
    kv_cache_dtype: str,
    log: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """As `starting_server`, when it listens."""
    with starting_server(model, kv_cache_dtype, log, options, environment) as start:
        while not start.is_healthy():
            time.sleep(0.5)
        yield Server(start.url, start.process.pid)


@contextmanager
def running(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which ends with this block, or with this process, whatever ends that.

    The latter holds of the main thread alone: the system would end a process with the thread that started it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent if is_main else None,
        )
    try:
        yield process
    finally:
        _stop(process)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask first; then end whatever is left of the session, engine and workers included."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of the log, or its last error with what led to it."""
    text = log.read_text(errors="replace").splitlines()
    errors = [line for line in text if re.search(r"\b\w*(Error|Exception)\b: ", line)]
    return "\n".join([*text[-lines:], *([""] if errors else []), *errors[:1]])


def free_port() -> int:
    """A free port of the loopback interface, below those from which the system takes one for each connection it makes.

    One of these might be taken before the server is so far, which takes seconds.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), k=100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise ServerError("No port is free.")
