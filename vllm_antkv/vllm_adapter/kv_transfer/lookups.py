"""Which tokens of a request have pages in files: one look at the file system for each request, by a thread.

It also tells the files that a request uses them whose pages are in the pool, or they would be the first to go.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from vllm.v1.core.kv_cache_utils import BlockHashList, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_antkv.vllm_adapter.kv_transfer.boundaries import read_at
from vllm_antkv.vllm_adapter.kv_transfer.files import PageFiles
from vllm_antkv.vllm_adapter.kv_transfer.ledger import Account
from vllm_antkv.vllm_adapter.kv_transfer.threads import Threads

#: Requests looked up at once, where a disk takes its time.
_THREADS = 8
#: Seconds that a step waits for a look, once for each request. An answer from memory comes sooner, and then no request
#: that misses waits for another step.
_GRACE = 0.001


@dataclass(frozen=True)
class Found:
    """What is there beyond the tokens that a request has already.

    codes: tokens up to which codes are there.
    end: tokens at which the request can resume, as all that it reads there is there.
    """

    codes: int
    end: int


@dataclass(frozen=True)
class _Look:
    """A look for pages behind `start` tokens."""

    start: int
    found: Future[Found]


class Lookups:
    """Those of waiting requests.

    files: of all ranks; what one of them lacks is not there.
    """

    def __init__(self, files: Sequence[PageFiles]) -> None:
        self._files = files
        self._threads = Threads("look", _THREADS)
        self._looks: dict[str, _Look] = {}
        self._account = Account()
        self._asked_account: Future[Account] | None = None

    def find(self, request: Request, start: int, managers: Sequence[SingleTypeKVCacheManager]) -> Found | None:
        """What is there of a request whose pages up to `start` tokens are in the pool; None: ask again later."""
        look = self._looks.get(request.request_id)
        if look is None or start < look.start:
            look = _Look(start, self._threads.submit(self._look, request, start, managers))
            self._looks[request.request_id] = look
            if start < _most(request, managers):
                wait((look.found,), timeout=_GRACE)
        if start >= _most(request, managers):
            # There can be no more.
            return Found(start, start)
        return look.found.result() if look.found.done() else None

    def forget(self, request_id: str) -> None:
        """What is asked about this request from now on needs another look."""
        self._looks.pop(request_id, None)

    def account(self) -> Account:
        """What was written down of the folder when this was asked last, unless the disk answers at once."""
        if self._asked_account is None or self._asked_account.done():
            self._asked_account = self._threads.submit(self._files[0].ledger.read)
            wait((self._asked_account,), timeout=_GRACE)
        if self._asked_account.done():
            self._account = self._asked_account.result()
        return self._account

    def end(self) -> None:
        """Let the threads end."""
        self._threads.end()

    def _look(self, request: Request, start: int, managers: Sequence[SingleTypeKVCacheManager]) -> Found:
        step, codes = managers[0].scheduler_block_size, _most(request, managers)
        sparse = []
        for manager in managers:
            size, missing = manager.block_size, partial(self._is_missing, manager, hashes_of(request, manager))
            if isinstance(manager, FullAttentionManager):
                have = next(filter(missing, range(codes // size)), codes // size)
                codes = have * size // step * step
            else:
                sparse.append((size, manager, missing))
        for end in range(codes, start, -step):
            reads = ((size, missing, read_at(end, manager)) for size, manager, missing in sparse)
            if not any(index * size >= start and missing(index) for size, missing, read in reads for index in read):
                return Found(codes, end)
        return Found(codes, start)

    def _is_missing(self, manager: SingleTypeKVCacheManager, hashes: BlockHashList, index: int) -> bool:
        return not all(files.has(name_of(manager, hashes[index])) for files in self._files)


def _most(request: Request, managers: Sequence[SingleTypeKVCacheManager]) -> int:
    """Tokens at which a hit can end at most: the last one is computed."""
    step = managers[0].scheduler_block_size
    return (request.num_tokens - 1) // step * step


def hashes_of(request: Request, manager: SingleTypeKVCacheManager) -> BlockHashList:
    """Of the blocks of a group."""
    return resolve_block_hashes(request.block_hashes, manager.block_pool.hash_block_size, manager.block_size)


def name_of(manager: SingleTypeKVCacheManager, block_hash: bytes) -> str:
    """Of the file of a block."""
    return f"{block_hash.hex()}-{manager.kv_cache_group_id}"
