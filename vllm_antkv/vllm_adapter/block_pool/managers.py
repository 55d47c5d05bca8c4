"""Allocation of recency pages: real blocks for the pages that are still read, the null block for all others.

vLLM's own sliding-window manager reserves a page for every token in flight, which at 1 bit costs more than the whole
VQ cache. This manager allocates pages only for tokens that a later step, or a prefix-cache hit, reads.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import vllm
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request

from vllm_antkv.releases import supported_releases
from vllm_antkv.select.recency import ALWAYS
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec

#: Shared by decode steps that need no new page, which is most of them: no array operation for them.
_NO_PAGES = np.zeros(0, dtype=bool)
#: `_next_death` of a request without live pages.
_NEVER = 1 << 62
#: Pages for prefix-cache hits are stored only while 1/8 of the pool stays free, so that they never evict a request.
_SPARE_POOL_FRACTION = 8


class RecencyManager(SingleTypeKVCacheManager):
    """Block manager of recency pages; see `vllm_antkv.select.retention` for the rule."""

    def __init__(self, kv_cache_spec: RecencySpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.retention = kv_cache_spec.retention
        # Indices of each request's real blocks: a step costs their number, not the sequence's length.
        self._live: dict[str, list[int]] = {}
        self._next_death: dict[str, int] = {}
        # Result of `get_num_blocks_to_allocate`, for the `allocate_new_blocks` that follows it.
        self._counted: dict[str, tuple[int, int, np.ndarray]] = {}
        # They say, once scheduled, up to where other prompts begin with the same tokens.
        self._requests: WeakValueDictionary[str, Request] = WeakValueDictionary()
        # Tokens of a request's prefix-cache hit whose pages another one holds, too.
        self._shared_hits: dict[str, int] = {}

    def add_request(self, request: Request) -> None:
        """Know a request that is to be scheduled."""
        self._requests[request.request_id] = request

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks that the step takes from the pool: new pages, and hit pages that no other request holds."""
        del num_local_computed_tokens, num_tokens_main_model, prefill_end
        num_held = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        if apply_admission_cap:
            assert self.max_admission_blocks_per_request is not None
            # The most that a request holds, of which a hit is a part.
            num_hit = sum(not block.is_null for block in new_computed_blocks)
            most = self.max_admission_blocks_per_request - num_hit
            num_new = min(cdiv(num_tokens, self.block_size) - num_held, most)
        else:
            first = max(num_held, total_computed_tokens // self.block_size)
            pages = self._pages_to_store(request_id, first, num_tokens)
            if first > num_held:
                # A KV connector fills those that a request resuming there reads.
                loaded = self.retention.needed_after(np.arange(num_held, first), total_computed_tokens)
                pages = np.append(loaded, pages)
            self._counted[request_id] = (num_held, num_tokens, pages)
            num_new = int(pages.sum())
        return max(num_new, 0) + self._get_num_evictable_blocks(new_computed_blocks)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Take over the pages of a prefix-cache hit; `find_longest_cache_hit` put null where none is needed."""
        del num_external_computed_tokens
        blocks = self.req_to_blocks[request_id]
        if blocks:
            raise _unexpected(f"a prefix-cache hit for request {request_id}, which already holds {len(blocks)} pages")
        real = [index for index, block in enumerate(new_computed_blocks) if not block.is_null]
        if any(new_computed_blocks[index].ref_cnt and self.retention.last_use[index] < ALWAYS for index in real):
            self._shared_hits[request_id] = num_local_computed_tokens
        self.block_pool.touch([new_computed_blocks[index] for index in real])
        blocks.extend(new_computed_blocks)
        self.num_cached_block[request_id] = len(blocks)
        self._track(request_id, real)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Pages for a KV connector to fill are counted with those of the step, and `allocate_new_blocks` takes both."""

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Append the step's pages to the request's block table."""
        del num_tokens_main_model
        blocks = self.req_to_blocks[request_id]
        first = len(blocks)
        *counted, needed = self._counted.pop(request_id, (None, None, _NO_PAGES))
        if counted != [first, num_tokens]:
            raise _unexpected(
                f"pages for {num_tokens} tokens of request {request_id} behind {first} pages, not for {counted[1]} "
                f"behind {counted[0]} as it counted"
            )
        if not len(needed):
            return []
        fresh = iter(self.block_pool.get_new_blocks(int(needed.sum())))
        new_blocks = [next(fresh) if real else self._null_block for real in needed]
        blocks.extend(new_blocks)
        self._track(request_id, [first + int(index) for index in np.flatnonzero(needed)])
        return new_blocks

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the pages that no later step reads, nor a hit that is shared; called before each step's allocation."""
        del num_prompt_tokens
        if processed_computed_tokens <= self._next_death.get(request_id, _NEVER):
            return
        live = np.array(self._live[request_id])
        keep = self._last_use(request_id, live) >= processed_computed_tokens
        self._remove_blocks(request_id, live[~keep].tolist())
        self._live[request_id] = []
        self._track(request_id, live[keep].tolist())

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a request."""
        self._live.pop(request_id, None)
        self._next_death.pop(request_id, None)
        self._counted.pop(request_id, None)
        self._shared_hits.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def pages_in_use(self) -> int:
        """Pages that requests hold, shared ones counted once."""
        held = (self.req_to_blocks[request_id][index] for request_id, live in self._live.items() for index in live)
        return len({block.block_id for block in held})

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest aligned prefix whose still-needed pages are all cached."""
        assert isinstance(kv_cache_spec, RecencySpec)
        if drop_eagle_block:
            # VLLM added one, to be dropped where the cache of an EAGLE head ends.
            max_length -= kv_cache_spec.block_size
        if dcp_world_size * pcp_world_size > 1:
            raise _unexpected(f"sequences shared by {dcp_world_size * pcp_world_size} ranks")
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size)
        for boundary in range(max_length // alignment_tokens * alignment_tokens, 0, -alignment_tokens):
            blocks = _blocks_at(boundary, hashes, kv_cache_group_ids, block_pool, kv_cache_spec)
            if blocks is not None:
                return blocks, boundary
        return tuple([] for _ in kv_cache_group_ids), 0

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        retention_interval: int | None = None,
        reachable_boundaries: Sequence[int] = (),
        dcp_world_size: int = 1,
        final_segment_end_block: int | None = None,
    ) -> list[bool] | None:
        """Which full pages enter the prefix cache: those that a hit at a retained boundary reads."""
        assert isinstance(kv_cache_spec, RecencySpec)
        pages = np.arange(start_block, end_block)
        num_tokens = end_block * kv_cache_spec.block_size
        return kv_cache_spec.retention.reachable(pages, list(reachable_boundaries), num_tokens).tolist()

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """0: the prefix stays, so freed pages are not the beginning of the sequence."""
        return 0

    def _pages_to_store(self, request_id: str, first_page: int, num_tokens: int) -> np.ndarray:
        """Mask of the pages that the request needs and, while the pool has spare pages, that prefix-cache hits need."""
        if num_tokens <= first_page * self.block_size:
            return _NO_PAGES
        needed = self.retention.pages_of_step(first_page, num_tokens)
        if not self.enable_caching:
            return needed
        shared = self._shared_prefix(request_id)
        wanted = needed | self.retention.tails_of_step(first_page, num_tokens, shared)
        if shared and not self._is_alone(request_id):
            needed |= self.retention.tail(np.arange(first_page, first_page + len(needed)), shared)
        spare = self.block_pool.num_gpu_blocks // _SPARE_POOL_FRACTION
        return wanted if self.block_pool.get_num_free_blocks() - int(wanted.sum()) >= spare else needed

    def _track(self, request_id: str, new_live: list[int]) -> None:
        live = self._live.setdefault(request_id, [])
        live.extend(new_live)
        self._next_death[request_id] = int(self._last_use(request_id, np.array(live)).min()) if live else _NEVER

    def _last_use(self, request_id: str, pages: np.ndarray) -> np.ndarray:
        """The last position whose step reads each page.

        Where others begin with the same tokens, a hit's pages stay: while the pool is full, free ones are gone at once,
        and each prompt would be computed again.
        """
        last_use = self.retention.last_use[pages]
        if not self._is_alone(request_id):
            for shared in filter(None, (self._shared_hits.get(request_id), self._shared_prefix(request_id))):
                last_use[self.retention.tail(pages, shared)] = _NEVER
        return last_use

    def _shared_prefix(self, request_id: str) -> int:
        """Tokens with which other prompts begin, too, and whose codes were found, but not all of these pages."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.shared_prefix_boundary

    def _is_alone(self, request_id: str) -> bool:
        """No other request holds pages. Then none is stored or kept for others, so that the longest one still fits."""
        return len(self._live) == (request_id in self._live)

    def _remove_blocks(self, request_id: str, indices: list[int]) -> None:
        blocks = self.req_to_blocks[request_id]
        # Free the tail first, so that vLLM evicts it first.
        freed = [blocks[index] for index in reversed(indices)]
        for index in indices:
            blocks[index] = self._null_block
        self.block_pool.free_blocks(freed)


def add_request(manager: KVCacheManager, request: Request) -> None:
    """Let the managers of recency pages know a request that is to be scheduled."""
    for each in manager.coordinator.single_type_managers:
        if isinstance(each, RecencyManager):
            each.add_request(request)


def pages_in_use(manager: KVCacheManager) -> dict[str, int]:
    """Pages by class that requests hold; pages that only the prefix cache refers to count as free."""
    managers = manager.coordinator.single_type_managers
    of_class = {"recency": sum(each.pages_in_use() for each in managers if isinstance(each, RecencyManager))}
    if of_states := [each for each in managers if isinstance(each, MambaManager)]:
        held = chain.from_iterable(chain.from_iterable(each.req_to_blocks.values()) for each in of_states)
        of_class["state"] = len({block.block_id for block in held if not block.is_null})
    pool = manager.block_pool
    # Every block but the null block is held or free, and a held block that is none of these is a VQ page.
    return {"vq": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() - sum(of_class.values()), **of_class}


def _unexpected(request: str) -> RuntimeError:
    """Not an assertion: `python -O` would drop it, and rows would be read that are not there."""
    return RuntimeError(
        f"vLLM {vllm.__version__} asks the manager of recency pages for {request}: install a release that vllm-antkv "
        f"supports ({supported_releases()}), or report this."
    )


def _blocks_at(
    boundary: int, hashes: BlockHashList, kv_cache_group_ids: list[int], block_pool: BlockPool, spec: RecencySpec
) -> tuple[list[KVCacheBlock], ...] | None:
    found: tuple[list[KVCacheBlock], ...] = tuple(
        [block_pool.null_block] * (boundary // spec.block_size) for _ in kv_cache_group_ids
    )
    # Highest page first: at a boundary that was not retained, the tail is missing.
    for page in reversed(spec.retention.pages_at(boundary).tolist()):
        cached = block_pool.get_cached_block(hashes[page], kv_cache_group_ids)
        if cached is None:
            return None
        for blocks, block in zip(found, cached, strict=True):
            blocks[page] = block
    return found
