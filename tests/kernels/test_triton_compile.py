"""Every Triton kernel compiles without a GPU, and takes no more registers, shared memory and spills than recorded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("triton_resources.json")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--arch", "90", "--kernel", "encode_store", "anchor_score", "prefill", "decode", "merge"],
        ["--arch", "80", "100", "--kernel", "decode"],
    ],
    ids=" ".join,
)
def test_resources_of_the_1_bit_kernels(arguments):
    command = [sys.executable, "scripts/compile_triton.py", "--layer", "d8c256 h128 g4", "--check", str(RECORD)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command + arguments, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "agree with" in run.stdout
