"""Pages in files, one for a block of a group of layers. A file with whatever fault is as good as none."""

import errno
import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vllm_antkv.vllm_adapter.kv_transfer.ledger import Ledger

logger = logging.getLogger("vllm.antkv")

_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class PageFiles:
    """The files of one tensor-parallel rank of servers whose pages are interchangeable.

    ledger: of the folder that the user named.
    identity: of these servers, see `kv_transfer.identity`.
    rank, num_ranks: which layers and KV heads the pages have.
    """

    ledger: Ledger
    identity: str
    rank: int
    num_ranks: int
    #: What goes wrong at present, and has been said: a full disk keeps no page.
    _failing: set[str] = field(default_factory=set, compare=False)

    def has(self, name: str) -> bool:
        """Whether a block is there, which is then the one that was used last; it may still turn out to be damaged."""
        return _use(self._path(name))

    def write(self, name: str, layout: str, pages: bytes) -> None:
        """Store a block unless it is there; readers see all of it or nothing.

        Args:
            name: the block's hash and group.
            layout: what the bytes mean.
            pages: of all layers of the group.
        """
        path = self._path(name)
        if _use(path):
            return
        try:
            self._write(path, self._digest(name, layout, pages), pages)
        except OSError as error:
            self._say_once("write", f"Pages cannot be kept in {self.ledger.root} ({error.strerror or error}).")
        else:
            self._failing.discard("write")

    def _write(self, path: Path, *parts: bytes) -> None:
        num_bytes = sum(map(len, parts))
        with self.ledger.entering(num_bytes) as has_room:
            if not has_room:
                raise OSError(errno.EDQUOT, "max_bytes leaves no room")
            path.parent.mkdir(parents=True, exist_ok=True)
            file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False)  # noqa: SIM115
            # Whoever counts files now finds as many bytes as were entered.
            file.truncate(num_bytes)
        try:
            with file:
                file.writelines(parts)
            # Whoever counts files meanwhile would find neither.
            with self.ledger.entering(0):
                os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
                with self.ledger.entering(-num_bytes):
                    pass
            raise

    def read(self, name: str, layout: str) -> bytes | None:
        """The bytes of a block as they were written, or None. A file that is not as it was is removed."""
        path = self._path(name)
        try:
            content = path.read_bytes()
        except OSError as error:
            self._say_once("read", f"{path} cannot be read ({error.strerror or error}): its tokens are computed again.")
            return None
        self._failing.discard("read")
        pages = content[_DIGEST_BYTES:]
        _use(path)
        if content[:_DIGEST_BYTES] == self._digest(name, layout, pages):
            return pages
        logger.warning("%s is damaged, or of another server: its tokens are computed again.", path)
        with suppress(OSError):
            path.unlink()
        return None

    def _say_once(self, operation: str, message: str) -> None:
        """Until it works again."""
        if operation not in self._failing:
            logger.warning(message)
        self._failing.add(operation)

    def _path(self, name: str) -> Path:
        return self.ledger.root / self.identity / f"{self.rank}-of-{self.num_ranks}" / name[:2] / name

    def _digest(self, name: str, layout: str, pages: bytes) -> bytes:
        """Of the content, and of what it must be the content of: a file that was moved is damaged, too."""
        head = "\n".join((self.identity, f"{self.rank}-of-{self.num_ranks}", name, layout))
        digest = hashlib.sha256(hashlib.sha256(head.encode()).digest())
        digest.update(pages)
        return digest.digest()


def _use(path: Path) -> bool:
    """Whether a file is there; this is when it was used last, unless others may not say so."""
    try:
        os.utime(path)
    except OSError:
        return os.path.exists(path)
    return True
