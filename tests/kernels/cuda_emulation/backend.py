"""Runs the sources of the CUDA kernels on a CPU: compiled with g++ against `emulation.h`, one fiber per thread."""

import ctypes
import subprocess
from collections.abc import Sequence
from functools import cache

from tests.kernels.cuda_emulation.build import library_of
from vllm_antkv.ops.cuda_backend import Argument
from vllm_antkv.ops.cuda_build import Build


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

    def __init__(self, shared_bytes: int = 232448, clusters: int = 0) -> None:
        self.shared_bytes, self.clusters = shared_bytes, clusters
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
