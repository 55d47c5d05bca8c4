"""Whoever goes beyond a tensor of the test engine is stopped."""

import ctypes
import os
import signal
from collections.abc import Callable

import pytest
import torch

from tests.kernels.forked import forked
from tests.kernels.guarded import guarded


def ending(action: Callable[[], object]) -> int:
    """How a process of its own ends that does something: the signal, or 0."""
    return os.WTERMSIG(forked(action))


@pytest.mark.parametrize("size", [1, 16, 4096, 5000])
def test_only_a_tensor_itself_can_be_read(size):
    copy = guarded(torch.arange(size, dtype=torch.int32))
    assert torch.equal(copy, torch.arange(size, dtype=torch.int32))
    assert copy.data_ptr() % 16 == 0
    end = copy.data_ptr() + copy.nbytes
    read = lambda address: ctypes.c_uint8.from_address(address).value  # noqa: E731
    assert ending(lambda: read(end - 1)) == 0
    # What rows are aligned to may lie between.
    assert ending(lambda: read(end + 15)) == signal.SIGSEGV
    assert ending(lambda: [read(address) for address in range(copy.data_ptr(), end - 4096 * (size // 1024 + 2), -1)])
