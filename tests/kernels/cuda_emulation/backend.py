"""Runs the sources of the CUDA kernels on a CPU: compiled with g++ against `emulation.h`, one fiber per thread."""

import ctypes
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.kernels.cuda_emulation.build import HERE, compile_kernels
from vllm_antkv.ops.cuda_backend import Argument
from vllm_antkv.ops.cuda_build import Build


@cache
def library(build: Build) -> ctypes.CDLL:
    definitions = [f"-D{name}={value}" for name, value in build.definitions.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        compile_kernels([HERE / f"{name}.cpp" for name in ("decode", "encode_store")], path, definitions)
        return ctypes.CDLL(str(path))


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
