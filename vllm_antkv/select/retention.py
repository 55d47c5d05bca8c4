"""Which recency pages are needed when: the recency table, seen page by page.

Pure numpy, so that the block manager and its tests share one definition.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.select.recency import last_use_table

#: Retained boundaries per step beside the last one; bounds what a step may hold on to.
_MAX_INTERVAL_BOUNDARIES = 1


@dataclass(frozen=True, eq=False)
class PageRetention:
    """When recency pages live and die.

    block_size: tokens per recency page.
    interval: prefix-cache retention interval in tokens; 0 keeps only the last boundary of a step.
    last_use: (num_pages,) int64, the last position whose step reads a row of the page.
    """

    block_size: int
    interval: int
    last_use: np.ndarray

    def needed_after(self, pages: np.ndarray, num_tokens: int) -> np.ndarray:
        """Mask of the pages that a later step reads once `num_tokens` tokens are computed."""
        return self.last_use[pages] >= num_tokens

    def pages_at(self, boundary: int) -> np.ndarray:
        """Pages that a request resuming at `boundary` tokens reads, ascending."""
        pages = np.arange(-(-boundary // self.block_size))
        return pages[self.needed_after(pages, boundary)]

    def pages_of_step(self, first_page: int, num_tokens: int) -> np.ndarray:
        """Mask over pages `first_page ...` that a step ending at `num_tokens` must store.

        Those that later steps read, and those that a request resuming at one of the step's boundaries would read.
        All other rows of the step are read from the keys and values in hand.
        """
        pages = np.arange(first_page, -(-num_tokens // self.block_size))
        needed = self.needed_after(pages, num_tokens)
        for boundary in self._boundaries(first_page * self.block_size, num_tokens):
            needed |= self.needed_after(pages, boundary) & (pages * self.block_size < boundary)
        return needed

    def reachable(self, pages: np.ndarray, boundaries: list[int]) -> np.ndarray:
        """Mask of the pages that serve a hit at one of the boundaries or at a multiple of the interval."""
        mask = np.zeros(len(pages), dtype=bool)
        if self.interval:
            mask |= self.last_use[pages] // self.interval * self.interval > pages * self.block_size
        for boundary in boundaries:
            aligned = boundary // VQ_BLOCK_SIZE * VQ_BLOCK_SIZE
            mask |= self.needed_after(pages, aligned) & (pages * self.block_size < aligned)
        return mask

    def max_pages(self, max_len: int, max_in_flight_tokens: int, max_steps: int) -> int:
        """Upper bound of the real pages one request holds at any time.

        Pages alive when the oldest step in flight began, plus what each step in flight stores.
        """
        num_pages = -(-max_len // self.block_size)
        per_step = -(-max_in_flight_tokens // max_steps // self.block_size) + 1
        stored = max(int(self.pages_of_step(0, end).sum()) for end in _sampled_ends(max_len))
        return min(num_pages, self._max_alive(num_pages) + max_steps * min(per_step, stored))

    def _boundaries(self, start: int, num_tokens: int) -> set[int]:
        # A resent prompt resumes one block lower when the prompt fills its last block exactly.
        last = {num_tokens // VQ_BLOCK_SIZE * VQ_BLOCK_SIZE, (num_tokens - 1) // VQ_BLOCK_SIZE * VQ_BLOCK_SIZE}
        multiples: list[int] = []
        if self.interval:
            multiples = list(range(start // self.interval * self.interval, num_tokens + 1, self.interval))
        return {b for b in (*last, *multiples[-_MAX_INTERVAL_BOUNDARIES:]) if b > start}

    def _max_alive(self, num_pages: int) -> int:
        """Most pages alive at once: born at their first token, dead after their last use."""
        births = np.arange(num_pages) * self.block_size
        deaths = np.minimum(self.last_use[:num_pages], num_pages * self.block_size) + 1
        change = np.zeros(num_pages * self.block_size + 2, dtype=np.int64)
        np.add.at(change, births, 1)
        np.add.at(change, deaths, -1)
        return int(change.cumsum().max())


@cache
def page_retention(config: AntKVConfig, max_len: int, block_size: int, interval: int) -> PageRetention:
    """The retention of recency pages for these settings and sequences of up to `max_len` tokens."""
    num_pages = -(-max_len // block_size)
    table = last_use_table(config, num_pages * block_size).numpy().astype(np.int64)
    return PageRetention(block_size, interval, table.reshape(num_pages, block_size).max(axis=1))


def _sampled_ends(max_len: int) -> list[int]:
    """Step ends that cover every offset in a VQ block, and lengths from short to long (for log retention)."""
    last_block = range(max(max_len - VQ_BLOCK_SIZE, 0) + 1, max_len + 1)
    spread = range(VQ_BLOCK_SIZE - 1, max_len, max(max_len // 64, 1))
    return [*last_block, *spread]
