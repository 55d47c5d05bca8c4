"""Memory that the machine code reads and writes: this process's own, where the kernels' arguments point.

Accesses outside of what is mapped raise; so do those outside of a CTA's shared memory.
"""

import ctypes
from bisect import bisect_right
from pathlib import Path

import numpy as np

#: The hardware keeps the first bytes of a CTA's shared memory for itself.
SHARED_START = 0x400
#: Addresses in shared memory have so many bits; those above name the CTA.
_SHARED_BITS = 24
#: Upper word of generic addresses that are in shared memory.
SHARED_WINDOW = 0x01000000


class GlobalMemory:
    """The mappings of this process as they are now."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._arrays: list[np.ndarray] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            bounds, access = line.split()[:2]
            first, last = (int(bound, 16) for bound in bounds.split("-"))
            if not access.startswith("rw") or "[v" in line:
                continue
            self._starts.append(first)
            self._arrays.append(np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first)))

    def _find(self, address: int, count: int) -> tuple[np.ndarray, int]:
        place = bisect_right(self._starts, address) - 1
        offset = address - self._starts[place]
        if place < 0 or offset + count > len(self._arrays[place]):
            raise MemoryError(f"no memory at {address:#x}")
        return self._arrays[place], offset

    def read(self, addresses: np.ndarray, count: int) -> np.ndarray:
        """(lanes, count) uint8."""
        array, offset = self._find(int(addresses[0]), count)
        start = int(addresses[0]) - offset
        if int(addresses.min()) >= start and int(addresses.max()) + count <= start + len(array):
            return array[(addresses - np.uint64(start)).astype(np.int64)[:, None] + np.arange(count)]
        return np.stack([_slice(*self._find(int(address), count), count) for address in addresses])

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """values: (lanes, count) uint8; of lanes at the same address the last wins."""
        count = values.shape[1]
        for address, value in zip(addresses, values, strict=True):
            array, offset = self._find(int(address), count)
            array[offset : offset + count] = value

    def copy(self, address: int, count: int) -> np.ndarray:
        """(count) uint8."""
        return _slice(*self._find(address, count), count)


class SharedMemory:
    """Of one CTA."""

    def __init__(self, num_bytes: int) -> None:
        self.data = np.full(SHARED_START + num_bytes, 0xFF, np.uint8)

    def _offsets(self, addresses: np.ndarray, count: int) -> np.ndarray:
        offsets = addresses.astype(np.int64) & (1 << _SHARED_BITS) - 1
        if (offsets % count).any():
            raise MemoryError(f"an access of {count} bytes to shared memory is not aligned")
        if offsets.min() < SHARED_START or offsets.max() + count > len(self.data):
            raise MemoryError("an access outside of shared memory")
        return offsets[:, None] + np.arange(count)

    def read(self, addresses: np.ndarray, count: int) -> np.ndarray:
        """(lanes, count) uint8."""
        return self.data[self._offsets(addresses, count)]

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """values: (lanes, count) uint8."""
        self.data[self._offsets(addresses, values.shape[1])] = values


class GenericMemory:
    """Both, by the address."""

    def __init__(self, everywhere: GlobalMemory, shared: SharedMemory) -> None:
        self._everywhere, self._shared = everywhere, shared

    def read(self, addresses: np.ndarray, count: int) -> np.ndarray:
        """(lanes, count) uint8."""
        inside = is_shared(addresses)
        values = np.empty((len(addresses), count), np.uint8)
        if inside.any():
            values[inside] = self._shared.read(addresses[inside], count)
        if not inside.all():
            values[~inside] = self._everywhere.read(addresses[~inside], count)
        return values

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """values: (lanes, count) uint8."""
        inside = is_shared(addresses)
        if inside.any():
            self._shared.write(addresses[inside], values[inside])
        self._everywhere.write(addresses[~inside], values[~inside])


def is_shared(addresses: np.ndarray) -> np.ndarray:
    """Of generic addresses: (lanes) bool."""
    return addresses >> np.uint64(32) == SHARED_WINDOW


def _slice(array: np.ndarray, offset: int, count: int) -> np.ndarray:
    return array[offset : offset + count]
