"""An object in a process of its own, told what to do step by step, so that several engines can take turns."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Remote:
    """What `make(*arguments)` returns, which is made there with the first call; `make` is a function of a module."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, make, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def call(self, method: str, *arguments: Any, seconds: float | None = None) -> Any:
        """What a method of the object returns.

        Raises:
            RuntimeError: an exception there, which stands on stderr, or the process ended.
            TimeoutError: it takes longer than `seconds`.
        """
        try:
            self._pipe.send((method, arguments))
            answer = self._pipe.recv() if self._pipe.poll(seconds) else TimeoutError(f"{seconds} s")
        except (EOFError, OSError):
            answer = RuntimeError(f"its process ended, exit code {self._process.exitcode}")
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, make: Callable[..., Any], *arguments: Any) -> None:
    made = None
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            # Nobody asks any more.
            return
        try:
            made = made or make(*arguments)
            pipe.send(getattr(made, method)(*given))
        except Exception as error:
            traceback.print_exc()
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
