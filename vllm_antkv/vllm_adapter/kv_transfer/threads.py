"""Threads that wait for a disk: no step does, nor does the end of a process where the disk does not answer any more."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Threads:
    """Some threads for calls of one kind.

    `ThreadPoolExecutor` would keep a process alive until the last call returns.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = f"antkv-{name}", count
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._are_running = False

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Let a thread make this call, after those that were submitted before. Not for several threads to use."""
        if not self._are_running:
            self._are_running = True
            for _ in range(self._count):
                Thread(target=self._work, name=self._name, daemon=True).start()
        future: Future[Any] = Future()
        self._calls.put((future, call, arguments))
        return future

    def end(self) -> None:
        """Let the threads end when they have made all calls."""
        for _ in range(self._count if self._are_running else 0):
            self._calls.put(None)
        self._are_running = False

    def _work(self) -> None:
        while (submitted := self._calls.get()) is not None:
            future, call, arguments = submitted
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)
