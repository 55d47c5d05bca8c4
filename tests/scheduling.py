"""Which tests run in one process: `pytest -n 2 -p tests.scheduling`, as `make test` does."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

#: Files that use the same servers: one process starts each once for all of them. The tests that end them are the last.
SERVER_FILES = [
    f"tests/serving/test_{name}.py"
    for name in ["bad_requests", "dashboard", "prometheus", "status", "tasks", "surface", "soak", "kill"]
]

#: Files whose engines have several processes: two at once may not fit into memory.
LARGE_FILES = [
    f"tests/serving/test_{name}.py" for name in ["pair", "shared_store", "data_parallel", "machines", "pipeline"]
]


class FileScheduling(LoadFileScheduling):
    """Runs a file in one process, and all files that share servers or memory."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return next((files[0] for files in (SERVER_FILES, LARGE_FILES) if scope in files), scope)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    return FileScheduling(config, log)
