"""What an access costs by the addresses that it has: wavefronts of shared memory, sectors and where they come from."""

from collections import OrderedDict

import numpy as np

from research.sm_model.constants import Constants

SECTOR = 32


def shared_wavefronts(addresses: np.ndarray, width: int) -> int:
    """Of 128 bytes: lanes are served 32, 16 or 8 together, and each bank gives a word of 4 bytes at a time."""
    together = 32 if width <= 4 else 128 // width
    count = 0
    for first in range(0, len(addresses), together):
        served = addresses[first : first + together].astype(np.int64)
        words = np.unique((served[:, None] + np.arange(0, max(width, 4), 4)) // 4)
        count += int(np.bincount(words % 32).max())
    return count


def sectors(addresses: np.ndarray, width: int) -> np.ndarray:
    """Numbers of the sectors that are touched, each once."""
    ends = np.concatenate((addresses, addresses + np.uint64(width - 1)))
    return np.unique(ends // np.uint64(SECTOR))


class Hierarchy:
    """L1 of a multiprocessor (least recently used), behind it L2, which holds everything but what is streamed.

    streamed: ranges of addresses that come from DRAM when they are first touched.
    """

    def __init__(self, constants: Constants, shared_bytes: int, streamed: list[tuple[int, int]]) -> None:
        self._constants = constants
        self._room = (constants.l1_and_shared - shared_bytes) // SECTOR
        self._l1: OrderedDict[int, None] = OrderedDict()
        self._streamed = [(first // SECTOR, last // SECTOR) for first, last in streamed]
        self._in_l2: set[int] = set()
        self._l2_free = self._dram_free = 0.0
        self.sectors = 0

    def access(self, time: float, found: np.ndarray, past_l1: bool = False) -> float:
        """When the last of these sectors is there."""
        c, done = self._constants, time + self._constants.l1_latency
        for sector in found.tolist():
            if sector in self._l1 and not past_l1:
                self._l1.move_to_end(sector)
                continue
            self.sectors += 1
            self._l2_free = max(self._l2_free, time) + SECTOR / c.l2_bytes
            ready = self._l2_free + c.l2_latency
            if sector not in self._in_l2 and any(a <= sector <= b for a, b in self._streamed):
                self._in_l2.add(sector)
                self._dram_free = max(self._dram_free, time) + SECTOR / c.dram_bytes
                ready = max(ready, self._dram_free + c.dram_latency)
            done = max(done, ready)
            if not past_l1:
                self._l1[sector] = None
                if len(self._l1) > self._room:
                    self._l1.popitem(last=False)
        return done
