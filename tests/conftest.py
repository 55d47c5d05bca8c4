"""What every test relies on: no network, no telemetry, one thread, and a way to say that an error reads well."""

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# One test process per core: with more threads each, most of the time goes into waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# A loaded machine is no failure, and a failure must come back: the same examples on every run.
hypothesis.settings.register_profile("antkv", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("antkv")


@pytest.fixture
def reads_well(tmp_path: Path) -> Callable[[BaseException], str]:
    """Checks that an error is one sentence for a person, and returns it."""

    def check(error: BaseException) -> str:
        text = str(error)
        assert text, "an error must say something"
        assert "\n" not in text
        # The folders of a test are as deep as whoever runs it makes them.
        assert len(text.replace(str(tmp_path), "")) < 600
        assert text.endswith("."), text
        assert "Traceback" not in text
        return text

    return check


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
