"""Settings and fixtures for all tests: no network, no telemetry, one thread, readable errors."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.scheduling import LARGE_FILES, SERVER_FILES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Otherwise every process that a test starts compiles all modules of vLLM again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# There is one test process per core: more threads would mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# No deadline, because a busy machine must not fail a test; the same examples on every run, so that failures repeat.
SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "antkv", deadline=None, derandomize=True, max_examples=50, suppress_health_check=SLOW
)
#: For minutes of fuzzing: `pytest tests/fuzz --hypothesis-profile fuzz`.
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=20_000, suppress_health_check=SLOW)
hypothesis.settings.load_profile("antkv")

Refused = Callable[..., AbstractContextManager[pytest.ExceptionInfo[BaseException]]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports make a million permanent objects: do not collect garbage meanwhile, and freeze them afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Let libraries see their objects when the process ends."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    """Fail the test that leaves gradients disabled, not the tests after it."""
    yield
    enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert enabled


@pytest.fixture
def reads_well(tmp_path) -> Callable[[BaseException], str]:
    """Checks that an error is one sentence for a person, and returns it."""

    def check(error: BaseException) -> str:
        text = str(error)
        assert text, "an error must say something"
        assert "\n" not in text
        # A temporary path may be of any length.
        assert len(text.replace(str(tmp_path), "")) < 600
        assert text.endswith("."), text
        assert "Traceback" not in text
        return text

    return check


@pytest.fixture
def refused(reads_well) -> Refused:
    """`refused(kind, *words)`: a block that must end with an error of this kind: one sentence with these words."""

    @contextmanager
    def expect(kind: type[BaseException], *words: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        with pytest.raises(kind) as caught:
            yield caught
        sentence = reads_well(caught.value)
        for each in words:
            assert each in sentence

    return expect


@pytest.fixture
def said(monkeypatch) -> Iterator[list[str]]:
    """Messages of the plugin's logger. A filter collects them: configuring an engine resets handlers and levels."""
    messages: list[str] = []
    logger = logging.getLogger("vllm.antkv")
    monkeypatch.setattr(logger, "isEnabledFor", lambda level: level >= logging.INFO)

    def listen(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return True

    logger.addFilter(listen)
    yield messages
    logger.removeFilter(listen)


#: Folders of slow tests, the slowest first: started last, one of them would run alone at the end.
SLOW_FOLDERS = ("serving", "kernels", "calibrate")


def start_order(item: pytest.Item) -> int:
    """Position of the test's file in the order of execution: first those that share servers or memory, together."""
    file = item.path.relative_to(Path(__file__).parents[1])
    together = [*SERVER_FILES, *LARGE_FILES]
    if file.as_posix() in together:
        return together.index(file.as_posix())
    ranks = [rank for rank, folder in enumerate(SLOW_FOLDERS) if folder in file.parts]
    return len(together) + (ranks[0] if ranks else len(SLOW_FOLDERS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow folders first; mark the tests of `gpu` and `serving` so, and skip those where there is no GPU."""
    items.sort(key=start_order)
    for item in items:
        if item.path.parent.name in ("gpu", "serving"):
            item.add_marker(item.path.parent.name)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
