"""The demo leaves nothing behind. (That it works is shown by `make demo ARGS=--once`.)"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.server import tail
from tests.patience import PATIENCE

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


def gone(pid, seconds=PATIENCE):
    for _ in range(int(seconds / 0.1)):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_demo(tmp_path, number):
    command = [sys.executable, "-c", _RUN, str(tmp_path / "log")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    server, engine = map(int, process.stdout.readline().split())
    try:
        process.send_signal(number)
        process.wait(PATIENCE)
        assert gone(server)
        # After kill -9 the server is told to stop; its own children are then its own business.
        assert number == signal.SIGKILL or gone(engine)
    finally:
        for pid in (server, engine):
            if not gone(pid, 0.1):
                os.kill(pid, signal.SIGKILL)


def test_a_failure_shows_the_end_of_the_log_and_its_first_error(tmp_path):
    log = tmp_path / "server.log"
    lines = ["ValueError: the cause"] + [f"line {i}" for i in range(100)]
    log.write_text("\n".join(lines))
    assert tail(log).splitlines() == [*lines[-25:], "", "ValueError: the cause"]
