"""Seconds that a test waits for an event.

Only a hanging test reaches it, so that no result depends on a machine's speed or load.
"""

import time
from collections.abc import Callable

PATIENCE = 900


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
