"""vLLM's KV connector `AntKVStore`: pages of all classes, in files under the hashes of vLLM's prefix cache.

What the prefix cache would find under these hashes is found here, after a restart or on another server. The scheduler
asks which files there are, and says which blocks to load and to save; workers check what they read. A request of which
one page cannot be loaded is computed as if none had been there. Threads wait for the disk and for copies between a GPU
and the host, and no step does.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_antkv.errors import SettingsError
from vllm_antkv.vllm_adapter.kv_transfer import STORE
from vllm_antkv.vllm_adapter.kv_transfer.boundaries import Boundaries
from vllm_antkv.vllm_adapter.kv_transfer.files import PageFiles
from vllm_antkv.vllm_adapter.kv_transfer.identity import has_lasting_hashes
from vllm_antkv.vllm_adapter.kv_transfer.lanes import Lane, Lanes, Point
from vllm_antkv.vllm_adapter.kv_transfer.ledger import Ledger
from vllm_antkv.vllm_adapter.kv_transfer.lookups import Lookups, hashes_of, name_of
from vllm_antkv.vllm_adapter.kv_transfer.pages import Block, PoolPages
from vllm_antkv.vllm_adapter.kv_transfer.saver import Saver
from vllm_antkv.vllm_adapter.kv_transfer.savings import Savings, Store
from vllm_antkv.vllm_adapter.kv_transfer.settings import IDENTITY_KEY, StoreSettings
from vllm_antkv.vllm_adapter.kv_transfer.threads import Threads

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

#: Requests that are loaded at once.
_LOADING_THREADS = 8
#: Seconds that a server which ends waits for pages to be saved.
_LAST_SECONDS = 10
#: Seconds of a step in which nothing is computed, as in vLLM's engine process.
_TURN = 0.001


@dataclass
class Transfers(KVConnectorMetadata):
    """What the workers do in a step: begin to load the blocks of some requests, and afterwards save blocks."""

    loads: dict[str, list[Block]] = field(default_factory=dict)
    saves: list[Block] = field(default_factory=list)


class AntKVStore(KVConnectorBase_V1, SupportsHMA):
    """See the module. A `kv_producer` saves, a `kv_consumer` loads, `kv_both` does both."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        if IDENTITY_KEY not in extra:
            raise SettingsError(f"{STORE} stores pages of an antkv cache: use one, or another KV connector.")
        num_ranks = vllm_config.parallel_config.world_size
        ranks = range(num_ranks) if role == KVConnectorRole.SCHEDULER else [vllm_config.parallel_config.rank]
        settings = StoreSettings.of(extra)
        ledger = Ledger(Path(settings.folder), settings.max_bytes)
        files = [PageFiles(ledger, extra[IDENTITY_KEY], rank, num_ranks) for rank in ranks]
        # Of the scheduler: tokens of waiting requests that are in the pool; admitted requests, and how many blocks of
        # their groups are known to the files; loads of the step; what failed.
        self._boundaries = Boundaries.of(vllm_config)
        self._lookups = Lookups(files)
        self._savings = Savings()
        self._local: dict[str, int] = {}
        self._seen: dict[str, tuple[Request, list[int]]] = {}
        self._loads: dict[str, list[Block]] = {}
        self._failed: set[str] = set()
        # Of a worker, whose rank is the only one.
        self._files = files[0]
        self._saver = Saver(self._files)
        self._loaders = Threads("load", _LOADING_THREADS)
        self._loading: dict[str, Future[bool]] = {}
        # Of both.
        self._stopped = False

    @property
    def requires_kv_delivery(self) -> bool:
        """A page that was not saved is a later miss."""
        return False

    def stop(self) -> None:
        """Neither load nor save from now on: the model has other weights than the pages in the files."""
        self._stopped = True

    def flush(self, seconds: float) -> bool:
        """Wait until what was computed is saved, but no longer than this; whether it is."""
        return self._saver.flush(seconds)

    def shutdown(self) -> None:
        """Save what waits to be saved, unless that takes too long."""
        self.flush(_LAST_SECONDS)
        for threads in (self._lookups, self._saver, self._loaders):
            threads.end()

    # The scheduler's side.

    def reset_cache(self) -> bool:
        """Asked of vLLM with `reset_connector`, where whatever was cached is not to be used any more."""
        self.stop()
        return True

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond those of a local hit whose pages are in files; they are loaded between steps."""
        self._local[request.request_id] = num_computed_tokens
        is_on = self._kv_transfer_config.is_kv_consumer and not self._stopped
        if not is_on or not has_lasting_hashes(request) or request.request_id in self._failed:
            return 0, False
        found = self._lookups.find(request, num_computed_tokens, self._managers)
        if found is None:
            return None, False
        # Codes may go on where rows end: then the next prompt that begins with them is to find rows, too.
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, found.codes)
        num_new = max(found.end - num_computed_tokens, 0)
        return num_new, num_new > 0

    def update_state_after_alloc(self, request: Request, blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Note which blocks of an admitted request to load, and which are new to the files: those behind the hit."""
        if not has_lasting_hashes(request) or request.num_computed_tokens:
            # Or it is admitted again, once it is loaded.
            return
        self._lookups.forget(request.request_id)
        self._savings.lookups += 1
        hit = self._local.pop(request.request_id) + num_external_tokens
        self._seen[request.request_id] = request, [hit // manager.block_size for manager in self._managers]
        if num_external_tokens:
            self._savings.load_begins(request.request_id, num_external_tokens)
            # All others have the hash of a local hit, or are null.
            self._loads[request.request_id] = [
                Block(manager.kv_cache_group_id, name_of(manager, block_hash), block.block_id)
                for manager, held in zip(self._managers, blocks.blocks, strict=True)
                for block_hash, block in zip(hashes_of(request, manager), held, strict=False)
                if not block.is_null and block.block_hash is None
            ]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Transfers:
        """The loads noted since the last step, and the blocks that enter the prefix cache in this one."""
        self._savings.step_begins(scheduler_output.total_num_scheduled_tokens)
        loads, self._loads = self._loads, {}
        if not scheduler_output.total_num_scheduled_tokens:
            # All wait for pages. An engine in the caller's process steps on and on then, and threads that read files
            # would hardly have a turn.
            time.sleep(_TURN)
        if self._stopped or not self._kv_transfer_config.is_kv_producer:
            return Transfers(loads)
        names = self._seen.keys() & scheduler_output.num_scheduled_tokens.keys()
        return Transfers(loads, [block for name in names for block in self._new_blocks(name)])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Ask no more for what could not be loaded: the file may be one that cannot be removed."""
        failed = connector_output.failed_recving or set()
        self._failed |= self._seen.keys() & failed
        for request_id in connector_output.finished_recving or ():
            self._savings.load_ends(request_id, request_id not in failed)
        self._savings.step_ends()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are saved already."""
        self._lookups.forget(request.request_id)
        self._local.pop(request.request_id, None)
        self._seen.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        return False, None

    def report(self) -> dict[str, Any]:
        """A `Store` in plain values; waits for no disk."""
        account = self._lookups.account()
        return Store(
            lookups=self._savings.lookups,
            hits=self._savings.hits,
            hit_tokens=self._savings.hit_tokens,
            seconds_saved=self._savings.seconds_saved,
            num_bytes=account.num_bytes,
            max_bytes=self._files.ledger.max_bytes,
            evictions=account.num_removed,
        ).model_dump()

    @property
    def _managers(self) -> tuple[SingleTypeKVCacheManager, ...]:
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager.coordinator.single_type_managers

    def _new_blocks(self, request_id: str) -> Iterator[Block]:
        request, seen = self._seen[request_id]
        for manager in self._managers:
            group, end = manager.kv_cache_group_id, manager.num_cached_block.get(request_id, 0)
            if seen[group] < end:
                held = manager.req_to_blocks[request_id]
                for index in self._boundaries.worth_keeping(range(seen[group], end), manager, request):
                    if (block_hash := held[index].block_hash) is not None:
                        yield Block(group, name_of(manager, get_block_hash(block_hash)), held[index].block_id)
                seen[group] = end

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the pages of all layers, each (num_blocks, ...)."""
        groups = enumerate(self._kv_cache_config.kv_cache_groups)
        layers = {group: {name: kv_caches[name] for name in spec.layer_names} for group, spec in groups}
        num_blocks = self._kv_cache_config.num_blocks
        assert all(len(pages) == num_blocks for of_group in layers.values() for pages in of_group.values())
        self._pages = PoolPages(layers)
        self._to_host = Lane(self._pages.device, self._pages.at_once)
        self._to_device = Lanes(self._pages.device, self._pages.largest_block, _LOADING_THREADS)

    def watch(self, missing_rows: torch.Tensor) -> None:
        """Save nothing of steps in which a request lacks rows; see `Counters.missing_rows`. Before the first step."""
        self._missing_rows = missing_rows

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load. Until its end is reported nobody else uses these blocks, even if the request is aborted."""
        loads = self._transfers().loads
        # Whoever had these blocks before may have a step that is not computed yet.
        point = Point(self._pages.device) if loads else None
        for request_id, blocks in loads.items():
            self._loading[request_id] = self._loaders.submit(self._load, blocks, point)

    def wait_for_save(self) -> None:
        """Gather what the step computes, to save it later."""
        saves = self._transfers().saves
        if saves and not self._stopped:
            for gathered in self._pages.gather(saves, self._missing_rows.any()):
                self._saver.save(gathered, self._to_host)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has been loaded."""
        finished = {name for name, loaded in self._loading.items() if loaded.done()}
        failed = {name for name in finished if not self._loading.pop(name).result() or self._stopped}
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the step."""

    def _transfers(self) -> Transfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        return transfers

    def _load(self, blocks: list[Block], point: Point) -> bool:
        with self._to_device.one() as lane:
            # All are looked at, so that no file that is damaged stays.
            missing = [block for block in blocks if not self._load_one(block, lane, point)]
        return not missing

    def _load_one(self, block: Block, lane: Lane, point: Point) -> bool:
        content = None if self._stopped else self._files.read(block.name, self._pages.layout(block.group))
        if content is not None:
            self._pages.write(block, content, lane, point)
        return content is not None
