"""Runs the sources of the CUDA kernels on a CPU: compiled with g++ against `emulation.h`, one fiber per thread."""

import ctypes
import shutil
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from tests.kernels.cuda_emulation.build import library_of
from vllm_antkv.ops.cuda import CudaOperations
from vllm_antkv.ops.cuda_backend import Argument
from vllm_antkv.ops.cuda_build import Build
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.paged import ReferenceOperations

needs_emulation = pytest.mark.skipif(
    shutil.which("g++") is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the emulation needs g++ and an x86-64 processor with F16C",
)


@cache
def library(build: Build) -> ctypes.CDLL:
    builds = {"decode": build, "encode_store": build.of_coding()}
    parts = {name: [f"-D{macro}={value}" for macro, value in b.definitions.items()] for name, b in builds.items()}
    return ctypes.CDLL(str(library_of(parts)))


class EmulatedBackend:
    """See `vllm_antkv.ops.cuda_backend.Backend`. Few multiprocessors: a CTA then walks several splits."""

    multiprocessors = 4

    def __init__(self, shared_bytes: int = 232448) -> None:
        self.shared_bytes = shared_bytes
        # As GPUs have it that have so much.
        self.capability = (9, 0) if shared_bytes > 200_000 else (8, 0)

    def load(self, build: Build) -> None:
        library(build)

    def launch(
        self, build: Build, kernel: str, grid: tuple[int, ...], threads: int, shared: int, arguments: Sequence[Argument]
    ) -> None:
        assert shared <= self.shared_bytes
        sizes = (ctypes.c_int * 5)(*(*grid, 1, 1)[:3], threads, shared)
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        getattr(library(build), f"launch_{kernel}")(sizes, addresses)


def operations(backend: EmulatedBackend | None = None) -> Callable[[LayerState], CudaOperations]:
    """Builds a layer's operations, emulated."""
    return lambda layer: CudaOperations(layer, backend=backend or EmulatedBackend(), triton=ReferenceOperations(layer))


def decoding(backend: EmulatedBackend | None = None) -> Callable[[LayerState], CudaOperations]:
    """Likewise; rows are coded by the reference, which takes a tenth of the time."""

    def build(layer: LayerState) -> CudaOperations:
        emulated = operations(backend)(layer)
        emulated.encode_store = ReferenceOperations(layer).encode_store
        return emulated

    return build
