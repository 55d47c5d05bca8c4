"""A running `docker/prefill_proxy.py`."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.server import Start, free_port, running
from tests.patience import PATIENCE, wait_for
from tests.places import PRESET, ROOT


@contextmanager
def proxy(log: Path, prefill: str, decode: str, *options: str) -> Iterator[str]:
    """The URL of one."""
    port, script = free_port(), str(ROOT / "docker" / "prefill_proxy.py")
    command = [sys.executable, script, "--prefill", prefill, "--decode", decode, "--port", str(port), *options]
    with running(command, log, os.environ) as process:
        start = Start(PRESET, f"http://127.0.0.1:{port}", log, process, time.monotonic() + PATIENCE)
        wait_for(start.is_healthy)
        yield start.url
