"""How many bytes the files of a store take, which all of its servers write down in one place, and the limit.

Whoever is about to write enters the bytes first, so that the files never take more than is written down. A server that
is killed in between leaves too high a number, and the system takes back its lock. When the number reaches the limit,
the files are counted, which puts that right, and those that were used longest ago are removed.
"""

import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

_NAME = "ledger"
_NUMBERS = struct.Struct("<qq")
#: Paths of pages, and of files that are being written, below the folder: nothing else is ever removed.
_LEVELS = tuple(map(re.compile, (r"[0-9a-f]{64}", r"\d+-of-\d+", r"[0-9a-f]{2}", r"\..+|[0-9a-f]+-\d+")))
#: Nobody writes a page for so many seconds.
_ABANDONED = 600
_NOW = float("inf")
#: Of the limit: files are counted once for what is written in between.
_LEFT_IN_PLACE = 0.9


@dataclass(frozen=True)
class Account:
    """What is written down.

    num_bytes: that files take, or are about to.
    num_removed: files that the limit has cost.
    """

    num_bytes: int = 0
    num_removed: int = 0


@dataclass(frozen=True)
class Ledger:
    """Of one folder.

    root: the folder that the user named.
    max_bytes: the limit, or None.
    """

    root: Path
    max_bytes: int | None = None

    def read(self) -> Account:
        """What is written down; nothing where there is no folder yet. Waits for nobody."""
        try:
            content = (self.root / _NAME).read_bytes()
        except OSError:
            return Account()
        return Account(*_NUMBERS.unpack(content)) if len(content) == _NUMBERS.size else Account()

    @contextmanager
    def entering(self, num_bytes: int) -> Iterator[bool]:
        """Enter what is about to be written, negative what was not, and make room for it.

        Whether there is room. While this is open no other server enters or counts anything.

        Raises:
            OSError: as the file system does.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        # Closing it gives the lock back.
        with open(os.open(self.root / _NAME, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            content = file.read()
            known = len(content) == _NUMBERS.size
            account = Account(*_NUMBERS.unpack(content)) if known else self._counted(0, 0)
            if not self._fits(account.num_bytes + num_bytes):
                account = self._counted(num_bytes, account.num_removed)
            if not known:
                file.truncate(0)
            has_room = self._fits(account.num_bytes + num_bytes)
            entered = Account(max(account.num_bytes + num_bytes, 0), account.num_removed) if has_room else account
            # Before a file takes them: who is killed here leaves too high a number.
            _put(file, entered)
            try:
                yield has_room
            except BaseException:
                _put(file, account)
                raise

    def _fits(self, num_bytes: int, share: float = 1.0) -> bool:
        return self.max_bytes is None or num_bytes <= self.max_bytes * share

    def _counted(self, num_bytes: int, num_removed: int) -> Account:
        """Of the files that are there, once there is room for so many bytes more; without room nothing is removed."""
        files = sorted(_files(self.root))
        total = sum(size for _, size, _ in files)
        if not self._fits(total + num_bytes) and self._fits(num_bytes, _LEFT_IN_PLACE):
            for last_used, size, path in files:
                if last_used == _NOW or self._fits(total + num_bytes, _LEFT_IN_PLACE):
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                    num_removed += 1
                total -= size
        return Account(total, num_removed)


def _put(file: FileIO, account: Account) -> None:
    os.pwrite(file.fileno(), _NUMBERS.pack(account.num_bytes, account.num_removed), 0)


def _files(folder: str | Path, level: int = 0) -> Iterator[tuple[float, int, str]]:
    """When each file was used last, in seconds since the epoch or `_NOW`, its bytes and its path."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if not _LEVELS[level].fullmatch(entry.name):
            continue
        if level + 1 < len(_LEVELS):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, level + 1)
            continue
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            is_being_written = entry.name.startswith(".") and time.time() - status.st_mtime < _ABANDONED
            yield _NOW if is_being_written else status.st_mtime, status.st_size, entry.path
