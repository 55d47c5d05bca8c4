"""The model as a backend of the CUDA kernels: compiled for a real GPU, run on this machine, one CTA of the grid."""

import ctypes
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from research.sm_model.constants import Constants
from research.sm_model.machine import Cta, Machine
from research.sm_model.memory import GlobalMemory, SharedMemory
from research.sm_model.sass import Function, parse
from research.sm_model.sm import Multiprocessor, Report
from scripts.compile_cuda import SOURCES, compiled
from vllm_antkv.ops.cuda_backend import Argument
from vllm_antkv.ops.cuda_build import Build


def nvdisasm() -> Path:
    """Comes with Triton."""
    return Path(sysconfig.get_path("purelib"), "triton", "backends", "nvidia", "bin", "nvdisasm")


@cache
def functions(source: Path, *options: str) -> dict[str, Function]:
    """The kernels of a CUDA source in machine code, by name. options: of nvcc."""
    code, _ = compiled(source, *options)
    command = [str(nvdisasm()), "-c", "-hex", "-g", str(code)]
    return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def kernels_of(build: Build) -> dict[str, Function]:
    """Those of csrc/cuda/decode.cu on Hopper."""
    definitions = [f"-D{name}={value}" for name, value in build.definitions.items()]
    return functions(SOURCES / "decode.cu", "-arch=sm_90", *definitions)


@dataclass(frozen=True)
class Launch:
    """Of a kernel. parameters: bytes."""

    grid: tuple[int, int, int]
    threads: int
    shared: int
    parameters: bytes


def run_first(function: Function, launch: Launch, constants: Constants, streamed: list[tuple[int, int]]) -> Report:
    """What the first CTA of a grid takes, alone on its multiprocessor."""
    shared = SharedMemory(launch.shared)
    cta = Cta((0, 0, 0), launch.grid, launch.threads, shared, GlobalMemory(), launch.parameters)
    return Multiprocessor(Machine(function), cta, constants, streamed).run()


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
        launch = Launch((width, height, depth), threads, shared, parameters(arguments))
        self.reports[kernel] = run_first(kernels_of(build)[kernel], launch, self._constants, self.streamed)


def parameters(arguments: Sequence[Argument]) -> bytes:
    """As a launch lays them out: each where its alignment lets it start."""
    laid = b""
    for argument in arguments:
        laid += bytes(-len(laid) % ctypes.alignment(argument)) + bytes(argument)
    return laid
