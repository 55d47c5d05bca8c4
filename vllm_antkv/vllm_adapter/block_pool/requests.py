"""The engine core's view of its requests' VQ blocks: tokens in use, and the blocks of the last requests.

A block that no request holds can still be read as long as the prefix cache has it under its hash.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager, SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.vllm_adapter.block_pool.managers import RecencyManager

#: Number of requests that are remembered.
_MAX_REQUESTS = 8


@dataclass(frozen=True)
class ClosedBlocks:
    """A request's full VQ pages, whose anchors are chosen.

    number: of the request, counted from 1 by this engine.
    block_ids: of these pages, as kernels read them, by group of layers, equally many for all, from the beginning of the
        sequence to the last readable one; 0 where layers with a window have freed theirs.
    running: the request is not finished.
    """

    number: int
    request: Request
    block_ids: dict[int, list[int]]
    running: bool

    @property
    def num_blocks(self) -> int:
        """Of each group."""
        return len(next(iter(self.block_ids.values())))


class LastRequests:
    """The last requests of an engine; count: of all its requests."""

    def __init__(self) -> None:
        self._requests: deque[tuple[int, Request]] = deque(maxlen=_MAX_REQUESTS)
        self.count = 0

    def add(self, request: Request) -> None:
        """Remember a request, and forget the oldest."""
        self.count += 1
        self._requests.append((self.count, request))

    def closed_blocks(self, manager: KVCacheManager) -> list[ClosedBlocks]:
        """Those with a closed block that can be read, newest first."""
        closed = []
        for number, request in reversed(self._requests):
            running = request.request_id in _vq_manager(manager).req_to_blocks
            block_ids = _held if running else _remembered
            readable = np.flatnonzero(block_ids(request, manager, _vq_manager(manager)))
            num_blocks = int(readable.max(initial=-1)) + 1
            if num_blocks:
                ids = {
                    each.kv_cache_group_id: block_ids(request, manager, each)[:num_blocks]
                    for each in _vq_managers(manager)
                }
                closed.append(ClosedBlocks(number, request, ids, running))
        return closed


def tokens_in_use(scheduler: Scheduler) -> int:
    """Tokens whose codes requests hold now; shared tokens count once."""
    blocks = _vq_manager(scheduler.kv_cache_manager).req_to_blocks
    num_held = sum(len(held) for held in blocks.values())
    num_distinct = len({block.block_id for held in blocks.values() for block in held if not block.is_null})
    computed = sum(scheduler.requests[request_id].num_computed_tokens for request_id, held in blocks.items() if held)
    # Only full blocks are shared; blocks before a window are null.
    return computed - _vq_manager(scheduler.kv_cache_manager).block_size * (num_held - num_distinct)


def _vq_manager(manager: KVCacheManager) -> SingleTypeKVCacheManager:
    """The manager of the layers without a window, which hold all tokens, else that of the first group."""
    managers = _vq_managers(manager)
    return next((m for m in managers if isinstance(m, FullAttentionManager)), managers[0])


def _vq_managers(manager: KVCacheManager) -> list[SingleTypeKVCacheManager]:
    others = (RecencyManager, MambaManager)
    return [m for m in manager.coordinator.single_type_managers if not isinstance(m, others)]


def _held(request: Request, manager: KVCacheManager, of_group: SingleTypeKVCacheManager) -> list[int]:
    """Full pages of the group that a running request holds; 0 before the window."""
    ids = _pages(of_group.req_to_blocks[request.request_id], of_group)
    return ids[: request.num_computed_tokens // VQ_BLOCK_SIZE]


def _remembered(request: Request, manager: KVCacheManager, of_group: SingleTypeKVCacheManager) -> list[int]:
    """Pages of a finished request that the prefix cache still has; 0 for the others."""
    pool, group = manager.block_pool, of_group.kv_cache_group_id
    hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, of_group.block_size)
    cached = [pool.get_cached_block(block_hash, [group]) for block_hash in hashes]
    return _pages([pool.null_block if blocks is None else blocks[0] for blocks in cached], of_group)


def _pages(blocks: Sequence[KVCacheBlock], of_group: SingleTypeKVCacheManager) -> list[int]:
    """Ids of the pages in some blocks (`cache.pool_blocks.one_by_one`); 0 in the null block."""
    num_pages = of_group.block_size // VQ_BLOCK_SIZE
    ids = [0 if block.is_null else block.block_id for block in blocks]
    return [block_id and block_id * num_pages + page for block_id in ids for page in range(num_pages)]
