"""When recency pages are needed: the recency table, page by page.

Plain NumPy, so that the block manager and its tests share one definition.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.select.recency import last_use_table


@dataclass(frozen=True, eq=False)
class PageRetention:
    """When recency pages live and die.

    block_size: tokens per recency page.
    interval: tokens between the boundaries at which prefix-cache hits may end; 0 keeps only the last one of a step.
    last_use: (num_pages,) int64, the last position whose step reads the page.
    vq_block_size: tokens of a block of VQ pages, at whose edges hits end.
    unsettled: tokens at the end of a step that may be rejected, or are not computed yet.
    dropped: tokens that are taken off a hit.
    """

    block_size: int
    interval: int
    last_use: np.ndarray
    vq_block_size: int = VQ_BLOCK_SIZE
    unsettled: int = 0
    dropped: int = 0

    def needed_after(self, pages: np.ndarray, num_tokens: int) -> np.ndarray:
        """Mask of the pages that a later step reads once `num_tokens` tokens are computed."""
        return self.last_use[pages] >= num_tokens

    def pages_at(self, boundary: int) -> np.ndarray:
        """Pages that a request resuming at `boundary` tokens reads, ascending."""
        pages = np.arange(-(-boundary // self.block_size))
        return pages[self.needed_after(pages, boundary)]

    def pages_of_step(self, first_page: int, num_tokens: int) -> np.ndarray:
        """Mask over pages `first_page ...` that a step ending at `num_tokens` must store: later steps read them.

        The step itself attends to its own keys and values without pages. The next one may begin at the first of the
        unsettled tokens.
        """
        return self.needed_after(self._pages(first_page, num_tokens), num_tokens - self.unsettled)

    def tails_of_step(self, first_page: int, num_tokens: int, shared: int = 0) -> np.ndarray:
        """Mask over pages `first_page ...` that a request resuming at one of the step's boundaries reads.

        They make prefix-cache hits possible; the request itself does not need them. Boundaries are the multiples of the
        interval, the end of the step, where the same or a longer prompt resumes, and `shared`, if that is not 0: tokens
        with which other prompts begin, too.
        """
        pages = self._pages(first_page, num_tokens)
        # A repeated prompt that fills its last block resumes one block earlier.
        longest = num_tokens - self.dropped
        return self.reachable(pages, [longest, longest - 1, shared], num_tokens)

    def reachable(self, pages: np.ndarray, boundaries: list[int], num_tokens: int) -> np.ndarray:
        """Mask of the pages that serve a hit at one of the boundaries, or at a multiple of the interval.

        Args:
            pages: (n,) page indices.
            boundaries: tokens, rounded down to whole VQ blocks.
            num_tokens: no hit can end beyond it.
        """
        mask = np.zeros(len(pages), dtype=bool)
        starts = pages * self.block_size
        if self.interval:
            mask |= np.minimum(self.last_use[pages], num_tokens) // self.interval * self.interval > starts
        for boundary in boundaries:
            mask |= self.tail(pages, boundary)
        return mask

    def tail(self, pages: np.ndarray, boundary: int) -> np.ndarray:
        """Mask of the pages that a hit at `boundary` tokens, rounded down to whole VQ blocks, reads."""
        aligned = boundary // self.vq_block_size * self.vq_block_size
        return self.needed_after(pages, aligned) & (pages * self.block_size < aligned)

    def max_pages(self, max_len: int, max_in_flight_tokens: int, max_steps: int) -> int:
        """Upper bound of the real pages that one request holds at any time.

        Pages alive when the oldest step in flight began, plus those that each step in flight stores: alive at its end.
        """
        num_pages = -(-max_len // self.block_size)
        per_step = -(-(max_in_flight_tokens // max_steps + self.unsettled) // self.block_size) + 1
        alive = self._max_alive(num_pages)
        return min(num_pages, alive + max_steps * min(per_step, alive))

    def _pages(self, first_page: int, num_tokens: int) -> np.ndarray:
        return np.arange(first_page, -(-num_tokens // self.block_size))

    def _max_alive(self, num_pages: int) -> int:
        """The most pages alive at once, from their first token, which may come while unsettled, to their last use."""
        births = np.maximum(np.arange(num_pages) * self.block_size - self.unsettled, 0)
        deaths = np.minimum(self.last_use[:num_pages], num_pages * self.block_size) + 1
        change = np.zeros(num_pages * self.block_size + 2, dtype=np.int64)
        np.add.at(change, births, 1)
        np.add.at(change, deaths, -1)
        return int(change.cumsum().max())


@cache
def page_retention(
    config: AntKVConfig,
    max_len: int,
    block_size: int,
    interval: int,
    window: int | None = None,
    vq_block_size: int = VQ_BLOCK_SIZE,
) -> PageRetention:
    """Retention of recency pages for these settings, sequences of at most `max_len` tokens and layers with `window`."""
    num_pages = -(-max_len // block_size)
    table = last_use_table(config, num_pages * block_size, window).numpy().astype(np.int64)
    return PageRetention(block_size, interval, table.reshape(num_pages, block_size).max(axis=1), vq_block_size)
