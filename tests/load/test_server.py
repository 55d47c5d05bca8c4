"""A process lasts as long as the block that holds it."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from loadtest.server import running


def test_a_process_outlives_the_thread_that_started_it_and_not_its_block(tmp_path):
    with ExitStack() as held:
        with ThreadPoolExecutor(1) as pool:
            start = running(["sleep", "600"], tmp_path / "log", os.environ)
            process = pool.submit(held.enter_context, start).result()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
    assert process.returncode
