"""Which tests run in one process: `pytest -n 2 -p tests.scheduling`, as `make test` does."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

#: Files that use the same servers: one process starts each once for all of them. The tests that end them are the last.
SERVER_FILES = (
    "tests/serving/test_bad_requests.py",
    "tests/serving/test_dashboard.py",
    "tests/serving/test_prometheus.py",
    "tests/serving/test_status.py",
    "tests/serving/test_tasks.py",
    "tests/serving/test_surface.py",
    "tests/serving/test_soak.py",
    "tests/serving/test_kill.py",
)

#: Files whose engines have several processes: two at once may not fit into memory.
LARGE_FILES = (
    "tests/serving/test_pair.py",
    "tests/serving/test_shared_store.py",
    "tests/serving/test_data_parallel.py",
    "tests/serving/test_machines.py",
    "tests/serving/test_pipeline.py",
)


class FileScheduling(LoadFileScheduling):
    """Runs a file in one process, and all files that share servers or memory."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return next((files[0] for files in (SERVER_FILES, LARGE_FILES) if scope in files), scope)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    """The scheduler of xdist."""
    return FileScheduling(config, log)
