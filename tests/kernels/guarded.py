"""Memory that ends where nobody may read: a kernel that goes beyond a tensor ends the process, whoever emulates it."""

import ctypes
import mmap
from collections.abc import Callable
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
    room = -(-max(num_bytes, 1) // _PAGE) * _PAGE
    memory = mmap.mmap(-1, room + 2 * _PAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (first, first + _PAGE + room):
        if _libc.mprotect(page, _PAGE, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    if not num_bytes:
        return torch.empty_like(tensor)
    offset = _PAGE + (room - num_bytes) // _ALIGNMENT * _ALIGNMENT
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
    return copy.copy_(tensor)


def guarding(tables: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives tensors by name, or in a named tuple, which gives guarded ones."""

    def guarded_tables(*arguments: Any) -> Any:
        found = tables(*arguments)
        if isinstance(found, dict):
            return {name: guarded(tensor) for name, tensor in found.items()}
        return found._replace(**{name: guarded(tensor) for name, tensor in found._asdict().items()})

    return guarded_tables
