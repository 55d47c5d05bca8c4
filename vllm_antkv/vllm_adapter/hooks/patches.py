"""Changes to vLLM's classes and registries, kept in order so that all of them can be taken back."""

from collections.abc import Callable
from typing import Any


class Patches:
    """What the hooks changed.

    A plugin of which one hook turns out not to work must leave vLLM as it was, not with half of its hooks on.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of a class or a module."""
        was_there, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)
        # What was inherited is inherited again.
        self.on_undo(lambda: setattr(owner, name, before) if was_there else delattr(owner, name))

    def on_undo(self, undo: Callable[[], object]) -> None:
        """Remember how to take back what was just done."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Take everything back, the last change first."""
        while self._undo:
            self._undo.pop()()
