"""Short launches are those that Triton would make: the same compiled kernel, with the same arguments."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the driver's stand-in needs gcc")
@pytest.mark.skipif(torch.version.cuda is not None, reason="the driver is there")
def test_short_launches_hand_over_what_triton_does():
    command = [sys.executable, "-m", "tests.kernels.launches"]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "variants" in run.stdout
