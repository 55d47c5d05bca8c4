"""The model as a backend of the CUDA kernels: compiled for a real GPU, run on this machine, one CTA of the grid."""

import ctypes
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from scripts.compile_cuda import SOURCES, nvcc
from scripts.sm_model.constants import Constants
from scripts.sm_model.machine import Cta, Machine
from scripts.sm_model.memory import GlobalMemory, SharedMemory
from scripts.sm_model.sass import Function, parse
from scripts.sm_model.sm import Multiprocessor, Report
from vllm_antkv.ops.cuda_backend import Argument
from vllm_antkv.ops.cuda_build import Build


def nvdisasm() -> Path:
    """Comes with Triton."""
    return Path(sysconfig.get_path("purelib"), "triton", "backends", "nvidia", "bin", "nvdisasm")


@cache
def functions(source: Path, *options: str) -> dict[str, Function]:
    """The kernels of a CUDA source in machine code, by name. options: of nvcc."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/kernels.cubin"
        command = [nvcc() or "nvcc", "-cubin", "-std=c++17", "-lineinfo", f"-I{SOURCES}", *options]
        subprocess.run([*command, str(source), "-o", path], check=True)
        listing = subprocess.run(
            [str(nvdisasm()), "-c", "-hex", "-g", path], check=True, capture_output=True, text=True
        )
    return parse(listing.stdout)


def kernels_of(build: Build) -> dict[str, Function]:
    """Those of csrc/cuda/decode.cu on Hopper."""
    definitions = [f"-D{name}={value}" for name, value in build.definitions.items()]
    return functions(SOURCES / "decode.cu", "-arch=sm_90", *definitions)


class ModelledBackend:
    """See `vllm_antkv.ops.cuda_backend.Backend`.

    Runs the first CTA of a grid alone: one worker of KV head 0.

    streamed: ranges of addresses that are read from DRAM. reports: what the last launch of each kernel took.
    """

    multiprocessors = 1
    capability = (9, 0)
    shared_bytes = 232448

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self.streamed: list[tuple[int, int]] = []
        self.reports: dict[str, Report] = {}

    def load(self, build: Build) -> None:
        """See `Backend`."""
        kernels_of(build)

    def launch(
        self, build: Build, kernel: str, grid: tuple[int, ...], threads: int, shared: int, arguments: Sequence[Argument]
    ) -> None:
        """See `Backend`; ends when the CTA has."""
        width, height, depth = (*grid, 1, 1)[:3]
        cta = Cta(
            block=(0, 0, 0),
            grid=(width, height, depth),
            threads=threads,
            shared=SharedMemory(shared),
            memory=GlobalMemory(),
            parameters=parameters(arguments),
        )
        machine = Machine(kernels_of(build)[kernel])
        self.reports[kernel] = Multiprocessor(machine, cta, self._constants, self.streamed).run()


def parameters(arguments: Sequence[Argument]) -> bytes:
    """As a launch lays them out: each where its alignment lets it start."""
    laid = b""
    for argument in arguments:
        laid += bytes(-len(laid) % ctypes.alignment(argument)) + bytes(argument)
    return laid
