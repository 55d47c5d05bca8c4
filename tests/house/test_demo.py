"""The demo leaves nothing behind. (That it works is shown by `make demo ARGS=--once`.)"""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from loadtest.server import tail
from tests.patience import PATIENCE, wait_for

# A server that has a child of its own, as vLLM has its engine.
_SERVER = (
    "import subprocess, sys, time; c = subprocess.Popen(['sleep', '3600']); print(c.pid, flush=True); time.sleep(3600)"
)
_RUN = f"""
import os, signal, sys, time
from pathlib import Path
from loadtest import server
from scripts import demo
signal.signal(signal.SIGTERM, demo._interrupt)
# Whoever was started in the background by a shell inherits that SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
output = Path(sys.argv[1])
try:
    with server.running([sys.executable, "-c", {_SERVER!r}], output, os.environ) as process:
        while not output.read_text().strip():
            time.sleep(0.05)
        print(process.pid, output.read_text().strip(), flush=True)
        time.sleep(3600)
except KeyboardInterrupt:
    pass
"""


def gone(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_demo(tmp_path, number):
    command = [sys.executable, "-c", _RUN, str(tmp_path / "log")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    server, engine = map(int, process.stdout.readline().split())
    try:
        process.send_signal(number)
        process.wait(PATIENCE)
        # After kill -9 the server is told to stop; its own children are then its own business.
        wait_for(lambda: gone(server) and (number == signal.SIGKILL or gone(engine)))
    finally:
        for pid in (server, engine):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_failure_shows_the_end_of_the_log_and_its_first_error(tmp_path):
    log = tmp_path / "server.log"
    lines = ["ValueError: the cause"] + [f"line {i}" for i in range(100)]
    log.write_text("\n".join(lines))
    assert tail(log).splitlines() == [*lines[-25:], "", "ValueError: the cause"]
