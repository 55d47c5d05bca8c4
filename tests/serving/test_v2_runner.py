"""Model runner V2 and asynchronous scheduling, as GPUs have them: cases of test_exactness.py in a process of their own.

Its kernels run in Triton's interpreter, ours are those of the CPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.serving, pytest.mark.long]

CASES = Path(__file__).with_name("test_exactness.py")


def test_scheduling_is_not_seen_there_either() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.serving.v2_runner"]
    command += ["-k", "(preemption or reused or aborts or log) and not auto", str(CASES)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "4 passed" in done.stdout
