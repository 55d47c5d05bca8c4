"""Runs the sources of the CUDA kernels on a CPU: compiled with g++ against `emulation.h`, one fiber per thread."""

import ctypes
import shutil
import subprocess
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
    compiled = ctypes.CDLL(str(library_of(parts)))
    compiled.races_found.restype = compiled.emulation_sites.restype = ctypes.c_char_p
    compiled.emulation_change.argtypes = ctypes.c_char_p, ctypes.c_bool
    return compiled


def races_of(compiled: ctypes.CDLL) -> list[str]:
    """What the detector has found since it was last asked: a line for each kind of race, with its two places."""
    return [_described(line, compiled._name) for line in compiled.races_found().decode().splitlines()]


def _described(race: str, path: str) -> str:
    what, earlier, later, times = race.split("\t")
    # Return addresses: the access is before them.
    addresses = [hex(int(site) - 1) for site in (earlier, later)]
    command = ["addr2line", "--exe", path, "--inlines", "--basenames", *addresses]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    places = [line.split(" ")[0] for line in lines if line.split(":")[0].endswith((".cu", ".cuh"))]
    return f"{what}, {times} times: {' '.join(places)}"


class EmulatedBackend:
    """See `vllm_antkv.ops.cuda_backend.Backend`. Few multiprocessors: a CTA then walks several splits.

    `launch` raises AssertionError where it finds a race.
    """

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
        races = races_of(library(build))
        assert not races, "\n".join(races)


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
