"""Which tests run in one process: `pytest -n 2 -p tests.scheduling`, as `make test` does."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

#: Files that use the same servers: one process starts each once for all of them.
SERVER_FILES = (
    "tests/serving/test_bad_requests.py",
    "tests/serving/test_dashboard.py",
    "tests/serving/test_prometheus.py",
    "tests/serving/test_soak.py",
    "tests/serving/test_status.py",
    "tests/serving/test_surface.py",
    "tests/serving/test_tasks.py",
    "tests/serving/test_kill.py",
)


class FileScheduling(LoadFileScheduling):
    """Runs a file in one process, and all files that share servers."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return SERVER_FILES[0] if scope in SERVER_FILES else scope


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    """The scheduler of xdist."""
    return FileScheduling(config, log)
