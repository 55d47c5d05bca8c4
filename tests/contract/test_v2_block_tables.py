"""Runs v2_block_tables.py, on whatever vLLM is imported, in a process where Triton interprets kernels."""

import os
from pathlib import Path

import pytest

from tests.processes import run_pytest

pytestmark = [pytest.mark.serving, pytest.mark.long]


def test_runner_v2_shows_and_stores_what_it_should():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run_pytest(Path(__file__).with_name("v2_block_tables.py"), environment=environment)
