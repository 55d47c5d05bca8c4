"""Runs v2_block_tables.py, on whatever vLLM is imported, in a process where Triton interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.serving, pytest.mark.long]

CASES = Path(__file__).parent / "v2_block_tables.py"


def test_runner_v2_shows_and_stores_what_it_should() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
