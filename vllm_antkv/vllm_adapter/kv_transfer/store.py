"""vLLM's KV connector `AntKVStore`: pages of all classes, in files under the hashes of vLLM's prefix cache.

What the prefix cache would find under these hashes is found here, after a restart or on another server. The scheduler
looks for files and says which blocks to load and to save; workers check what they read. A request of which one page
cannot be loaded is computed as if none had been there.
"""

from collections.abc import Iterator
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
from vllm.v1.core.kv_cache_utils import get_block_hash, resolve_block_hashes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_antkv.errors import SettingsError
from vllm_antkv.vllm_adapter.block_pool.managers import RecencyManager
from vllm_antkv.vllm_adapter.kv_transfer import STORE
from vllm_antkv.vllm_adapter.kv_transfer.files import PageFiles
from vllm_antkv.vllm_adapter.kv_transfer.identity import FOLDER_KEY, IDENTITY_KEY, has_lasting_hashes

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


@dataclass(frozen=True)
class Block:
    """A block of a group of layers: the name of its file, and where it is in the pool."""

    group: int
    name: str
    block_id: int


@dataclass
class Transfers(KVConnectorMetadata):
    """What the workers do in a step: load the blocks of some requests, and afterwards save blocks."""

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
        self._files = [PageFiles(Path(extra[FOLDER_KEY]), extra[IDENTITY_KEY], rank, num_ranks) for rank in ranks]
        # Of the scheduler: how many blocks of a request's groups were looked at; loads of the step; what failed.
        self._seen: dict[str, list[int]] = {}
        self._loads: dict[str, list[Block]] = {}
        self._failed: set[str] = set()
        # Of a worker.
        self._layers: dict[int, dict[str, torch.Tensor]] = {}
        self._results = KVConnectorTransferResults()
        # Of both.
        self._stopped = False

    @property
    def requires_kv_delivery(self) -> bool:
        """A page that was not saved is a later miss."""
        return False

    def stop(self) -> None:
        """Neither load nor save from now on: the model has other weights than the pages in the files."""
        self._stopped = True

    # The scheduler's side.

    def reset_cache(self) -> bool:
        """Asked of vLLM with `reset_connector`, where whatever was cached is not to be used any more."""
        self.stop()
        return True

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens beyond those of a local hit whose pages are in files; they are loaded between steps."""
        is_on = self._kv_transfer_config.is_kv_consumer and not self._stopped
        if not is_on or not has_lasting_hashes(request) or request.request_id in self._failed:
            return 0, False
        found = self._longest_hit(request, num_computed_tokens) - num_computed_tokens
        return found, found > 0

    def update_state_after_alloc(self, request: Request, blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Note which blocks of an admitted request to load, and that none of its blocks was looked at."""
        if not has_lasting_hashes(request):
            return
        self._seen[request.request_id] = [0] * len(blocks.blocks)
        if num_external_tokens:
            # All others have the hash of a local hit, or are null.
            self._loads[request.request_id] = [
                Block(manager.kv_cache_group_id, _name(manager, block_hash), block.block_id)
                for manager, held in zip(self._managers, blocks.blocks, strict=True)
                for block_hash, block in zip(self._hashes(request, manager), held, strict=False)
                if not block.is_null and block.block_hash is None
            ]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Transfers:
        """The loads noted since the last step, and the blocks that enter the prefix cache in this one."""
        loads, self._loads = self._loads, {}
        if self._stopped or not self._kv_transfer_config.is_kv_producer:
            return Transfers(loads)
        names = self._seen.keys() & scheduler_output.num_scheduled_tokens.keys()
        return Transfers(loads, [block for name in names for block in self._new_blocks(name)])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Ask no more for what could not be loaded: the file may be one that cannot be removed."""
        self._failed |= self._seen.keys() & (connector_output.failed_recving or set())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are saved already."""
        self._seen.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        return False, None

    @property
    def _managers(self) -> tuple[SingleTypeKVCacheManager, ...]:
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager.coordinator.single_type_managers

    def _hashes(self, request: Request, manager: SingleTypeKVCacheManager) -> Any:
        return resolve_block_hashes(request.block_hashes, manager.block_pool.hash_block_size, manager.block_size)

    def _longest_hit(self, request: Request, start: int) -> int:
        """Tokens at which a request can resume whose pages up to `start` are there, and the others in files."""
        step = self._managers[0].scheduler_block_size
        end = (request.num_tokens - 1) // step * step
        sparse = []
        for manager in self._managers:
            size, hashes = manager.block_size, self._hashes(request, manager)

            def missing(index: int, manager: SingleTypeKVCacheManager = manager, hashes: Any = hashes) -> bool:
                return not all(files.has(_name(manager, hashes[index])) for files in self._files)

            if isinstance(manager, FullAttentionManager):
                have = next(filter(missing, range(start // size, end // size)), end // size)
                end = have * size // step * step
            else:
                sparse.append((manager, missing))
        for boundary in range(end, start, -step):
            if not any(
                missing(index)
                for manager, missing in sparse
                for index in _read_at(boundary, manager)
                if index * manager.block_size >= start
            ):
                return boundary
        return start

    def _new_blocks(self, request_id: str) -> Iterator[Block]:
        seen = self._seen[request_id]
        for manager in self._managers:
            group, end = manager.kv_cache_group_id, manager.num_cached_block.get(request_id, 0)
            for block in manager.req_to_blocks[request_id][seen[group] : end]:
                if block.block_hash is not None:
                    yield Block(group, _name(manager, get_block_hash(block.block_hash)), block.block_id)
            seen[group] = end

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the pages of all layers, each (num_blocks, ...)."""
        for group, spec in enumerate(self._kv_cache_config.kv_cache_groups):
            self._layers[group] = {name: kv_caches[name] for name in spec.layer_names}
            assert all(len(pages) == self._kv_cache_config.num_blocks for pages in self._layers[group].values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load; what cannot be loaded is reported with the step's results."""
        transfers = self._transfers()
        self._results = KVConnectorTransferResults(finished_recving=set(transfers.loads))
        for request_id, blocks in transfers.loads.items():
            # All are looked at, so that no file that is damaged stays.
            missing = blocks if self._stopped else [block for block in blocks if not self._load(block)]
            if missing:
                self._results.failed_recving.add(request_id)

    def wait_for_save(self) -> None:
        """Save what the step has computed."""
        (files,) = self._files
        for block in [] if self._stopped else self._transfers().saves:
            layers = self._layers[block.group].values()
            if not files.has(block.name):
                pages = (each[block.block_id].contiguous().view(-1).view(torch.uint8).numpy() for each in layers)
                files.write(block.name, self._layout(block.group), b"".join(page.tobytes() for page in pages))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What the step has loaded."""
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the step."""

    def _transfers(self) -> Transfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        return transfers

    def _layout(self, group: int) -> str:
        return " ".join(f"{name}:{pages.dtype}{list(pages.shape[1:])}" for name, pages in self._layers[group].items())

    def _load(self, block: Block) -> bool:
        (files,) = self._files
        content = files.read(block.name, self._layout(block.group))
        if content is None:
            return False
        at, loaded = 0, torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for pages in self._layers[block.group].values():
            page = pages[block.block_id]
            num_bytes = page.numel() * page.element_size()
            page.copy_(loaded[at : at + num_bytes].view(page.dtype).view(page.shape))
            at += num_bytes
        return True


def _read_at(boundary: int, manager: SingleTypeKVCacheManager) -> list[int]:
    """Blocks of a group that a request resuming at `boundary` tokens reads, those first that are missing most often."""
    if isinstance(manager, RecencyManager):
        return manager.retention.pages_at(boundary)[::-1].tolist()
    return list(range(manager.get_num_skipped_tokens(boundary) // manager.block_size, boundary // manager.block_size))


def _name(manager: SingleTypeKVCacheManager, block_hash: bytes) -> str:
    return f"{block_hash.hex()}-{manager.kv_cache_group_id}"
