"""Memory that ends where nobody may read: a kernel that goes beyond a tensor ends the process, whoever emulates it."""

import ctypes
import math
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_PAGE = mmap.PAGESIZE
#: What kernels expect of addresses, so that as many bytes less one behind a tensor may still be its neighbour's.
_ALIGNMENT = 16
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy with a page before it and one behind its last byte that cannot be touched."""
    num_bytes = tensor.numel() * tensor.itemsize
    memory, offset = _between_guards(-1, num_bytes)
    if not num_bytes:
        return torch.empty_like(tensor)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
    return copy.copy_(tensor)


def guarded_pool(shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes of all ones, in the same way: NaN in every dtype. What nobody writes into takes neither memory nor time."""
    num_bytes, file = math.prod(shape), _ones_file()
    missing = num_bytes + 3 * _PAGE - os.fstat(file).st_size
    if missing > 0:
        os.write(file, b"\xff" * missing)
    memory, offset = _between_guards(file, num_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset).view(shape)


def _between_guards(file: int, num_bytes: int) -> tuple[mmap.mmap, int]:
    """Memory that starts as the file has it (-1: as zeros), and where in it so many bytes are at the end."""
    room = -(-max(num_bytes, 1) // _PAGE) * _PAGE
    memory = mmap.mmap(file, room + 2 * _PAGE, mmap.MAP_PRIVATE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (first, first + _PAGE + room):
        if _libc.mprotect(page, _PAGE, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    return memory, _PAGE + (room - num_bytes) // _ALIGNMENT * _ALIGNMENT


@cache
def _ones_file() -> int:
    """In memory; empty at first. Pools have copies of the pages that they write into."""
    return os.memfd_create("ones")


def guarding(tables: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives tensors by name, or in a named tuple, which gives guarded ones."""

    def guarded_tables(*arguments: Any) -> Any:
        found = tables(*arguments)
        if isinstance(found, dict):
            return {name: guarded(tensor) for name, tensor in found.items()}
        return found._replace(**{name: guarded(tensor) for name, tensor in found._asdict().items()})

    return guarded_tables
