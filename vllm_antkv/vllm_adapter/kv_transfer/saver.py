"""Saves blocks behind the steps that computed them. What a disk does not take in time is not kept."""

import logging
from threading import Condition

from vllm_antkv.vllm_adapter.kv_transfer.files import PageFiles
from vllm_antkv.vllm_adapter.kv_transfer.lanes import Lane
from vllm_antkv.vllm_adapter.kv_transfer.pages import Gathered
from vllm_antkv.vllm_adapter.kv_transfer.threads import Threads

logger = logging.getLogger("vllm.antkv")

#: Bytes that wait in memory at most.
_WAITING = 256 << 20


class Saver:
    """Threads of a rank: one brings pages to the host, whatever the disk does, and one writes their files."""

    def __init__(self, files: PageFiles) -> None:
        self._files = files
        self._bringing, self._writing = Threads("bring", 1), Threads("save", 1)
        self._changed = Condition()
        self._waiting = 0
        self._is_behind = False

    def save(self, gathered: Gathered, lane: Lane) -> None:
        """Write the files of these blocks, later; lane: to the host, always the same."""
        with self._changed:
            if not self._waiting:
                self._is_behind = False
            elif self._waiting + gathered.pages.nbytes > _WAITING:
                return self._say_once()
            self._waiting += gathered.pages.nbytes
        self._bringing.submit(self._bring, gathered, lane)

    def flush(self, seconds: float) -> bool:
        """Wait until all is written, but no longer than this; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def end(self) -> None:
        """Let the threads end when all is written."""
        self._bringing.end()
        self._writing.end()

    def _say_once(self) -> None:
        """Until all is written."""
        if not self._is_behind:
            logger.warning(
                "%s takes pages more slowly than they are computed: some are not kept.", self._files.ledger.root
            )
        self._is_behind = True

    def _bring(self, gathered: Gathered, lane: Lane) -> None:
        contents: list[bytes] = []
        try:
            contents = gathered.contents(lane)
        except Exception:
            logger.exception("Pages were not kept.")
        self._writing.submit(self._write, gathered.names, gathered.layout, contents, gathered.pages.nbytes)

    def _write(self, names: list[str], layout: str, contents: list[bytes], num_bytes: int) -> None:
        try:
            for name, content in zip(names, contents, strict=False):
                self._files.write(name, layout, content)
        except Exception:
            logger.exception("Pages were not kept.")
        finally:
            with self._changed:
                self._waiting -= num_bytes
                self._changed.notify_all()
