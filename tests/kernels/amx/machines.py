"""Tile instructions one by one, and what is written in tile registers, as functions of `machines.cpp`."""

import ctypes

import numpy as np

from tests.kernels.amx.emulated import AMX_FLAGS, compiled
from tests.kernels.test_tiles import pointer

#: Sums of 5 rows and 7 columns, of 3 pairs.
FITTING = {0: (5, 28), 4: (5, 12), 6: (3, 28)}


def machines() -> ctypes.CDLL:
    """The functions."""
    return compiled("machines", *AMX_FLAGS)


def configuration(shapes: dict[int, tuple[int, int]], others: dict[int, int] | None = None) -> np.ndarray:
    """The 64 bytes that LDTILECFG reads: of tiles of some rows and bytes in a row, with `others` in their places."""
    content = np.zeros(64, np.uint8)
    content[0] = 1
    for tile, (rows, row_bytes) in shapes.items():
        content[16 + 2 * tile], content[48 + tile] = row_bytes, rows
    for place, byte in (others or {}).items():
        content[place] = byte
    return content


def configured() -> np.ndarray:
    """What STTILECFG writes."""
    found = np.full(64, 255, np.uint8)
    machines().configuration(pointer(found))
    return found
