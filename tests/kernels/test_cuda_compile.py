"""Every CUDA kernel compiles without a GPU, and takes no more registers, shared memory and spills than recorded."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.compile_cuda import nvcc

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("cuda_resources.json")


@pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
def test_resources_are_as_recorded():
    command = [sys.executable, "scripts/compile_cuda.py", "--check", str(RECORD)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "agree with" in run.stdout
