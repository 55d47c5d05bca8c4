"""Whoever goes beyond a tensor of the test engine is stopped: here, and in the emulated CUDA kernels."""

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.kernels.cuda_emulation.backend import EmulatedBackend, needs_emulation
from tests.kernels.cuda_emulation.cases import LAYERS
from tests.kernels.engine import Engine, draw_sequence
from tests.kernels.forked import forked
from tests.kernels.guarded import guarded
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.cuda import CudaOperations
from vllm_antkv.ops.paged import ReferenceOperations


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


@needs_emulation
@pytest.mark.parametrize(("missing", "signal_"), [(0, 0), (200, signal.SIGSEGV)])
def test_a_kernel_that_reads_behind_a_table_is_stopped(missing, signal_):
    """Told of a table of positions that is shorter than the sequence."""
    shape = LAYERS[1][0]

    def operations(layer):
        table = guarded(layer.last_query[: len(layer.last_query) - missing])
        short = replace(layer, last_query=table)
        return CudaOperations(short, backend=EmulatedBackend(), triton=ReferenceOperations(layer))

    engine = Engine(AntKVConfig(), shape, operations)
    sequence = draw_sequence(0, shape.max_len - 1, shape)
    engine.step([(sequence, shape.max_len - 2)])
    assert ending(lambda: engine.step([(sequence, 1)])) == signal_
