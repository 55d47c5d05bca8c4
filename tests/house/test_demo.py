"""The demo leaves nothing behind. (That it works is shown by `make demo ARGS=--once`.)"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"

# A server that has a child of its own, as vLLM has its engine.
_SERVER = (
    "import subprocess, sys, time; c = subprocess.Popen(['sleep', '3600']); print(c.pid, flush=True); time.sleep(3600)"
)
_RUN = f"""
import importlib.util, signal, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("demo", {str(DEMO)!r})
demo = importlib.util.module_from_spec(spec); spec.loader.exec_module(demo)
signal.signal(signal.SIGTERM, demo._interrupt)
# Whoever was started in the background by a shell inherits that SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
output = Path(sys.argv[1])
try:
    with demo._running([sys.executable, "-c", {_SERVER!r}], output) as server:
        while not output.read_text().strip():
            time.sleep(0.05)
        print(server.pid, output.read_text().strip(), flush=True)
        time.sleep(3600)
except KeyboardInterrupt:
    pass
"""


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_a_failure_shows_the_end_of_the_log_and_its_first_error(demo, tmp_path):
    log = tmp_path / "server.log"
    lines = ["ValueError: the cause"] + [f"line {i}" for i in range(100)]
    log.write_text("\n".join(lines))
    assert demo._tail(log).splitlines() == [*lines[-25:], "", "ValueError: the cause"]


def test_the_capacity_is_read_from_the_last_line(demo, tmp_path):
    output = tmp_path / "auto.json"
    output.write_text("a warning\n" + json.dumps(419328) + "\n")
    finished = subprocess.Popen(["true"])
    assert demo._capacity_from(finished, output) == 419328
