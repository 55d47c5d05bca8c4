"""Where a hit in the store may end, and which pages are kept for that.

Codes are kept of all tokens. Rows, and all else that only a request resuming at one place reads, are kept for the last
block of a prompt, for the block up to which its codes were found, as prompts may share that beginning again, and for
every 48th. For every fourth block, as in the pool, they would take as many bytes as the codes.
"""

from dataclasses import dataclass
from typing import Self

from vllm.config import VllmConfig
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.vllm_adapter.block_pool.managers import RecencyManager

_FEW = 48 * VQ_BLOCK_SIZE


def last_boundary(request: Request, step: int) -> int:
    """The end of the last block of a prompt that leaves a token to compute, in tokens."""
    return (request.num_prompt_tokens - 1) // step * step


def read_at(boundary: int, manager: SingleTypeKVCacheManager) -> list[int]:
    """Blocks of a group that a request resuming at `boundary` tokens reads, those first that are missing most often."""
    if isinstance(manager, RecencyManager):
        return manager.retention.pages_at(boundary)[::-1].tolist()
    return list(range(manager.get_num_skipped_tokens(boundary) // manager.block_size, boundary // manager.block_size))


@dataclass(frozen=True)
class Boundaries:
    """Where hits may end.

    interval: tokens between places that do not depend on prompts.
    max_len: tokens of the longest sequence.
    drops: whether vLLM takes a block off hits (EAGLE): the pool then has the rows of the end of a prompt one earlier.
    """

    interval: int
    max_len: int
    drops: bool

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        """Of a server: the pool must have the rows, too, at all multiples of the interval."""
        step = vllm_config.cache_config.prefix_cache_retention_interval or VQ_BLOCK_SIZE
        speculative = vllm_config.speculative_config
        drops = speculative is not None and speculative.use_eagle_block_drop()
        return cls(-(-_FEW // step) * step, vllm_config.model_config.max_model_len, drops)

    def worth_keeping(self, blocks: range, manager: SingleTypeKVCacheManager, request: Request) -> list[int]:
        """Those of a request's blocks, of a group, that a hit may read."""
        if isinstance(manager, FullAttentionManager):
            return list(blocks)
        first = blocks.start * manager.block_size // self.interval * self.interval + self.interval
        # What is not read at the next multiple is read at none of the later ones.
        last = min(blocks.stop * manager.block_size + self.interval - 1, self.max_len)
        boundaries = {*range(first, last + 1, self.interval), request.shared_prefix_boundary}
        boundaries.add(end := last_boundary(request, manager.scheduler_block_size))
        if self.drops:
            boundaries.add(end - manager.scheduler_block_size)
        return sorted({index for boundary in boundaries for index in read_at(boundary, manager) if index in blocks})
