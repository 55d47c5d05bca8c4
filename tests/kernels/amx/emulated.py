"""AMX on processors without it: `emulator.cpp` executes its instructions, and whoever asks is told that it is there."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.kernels.kept import kept
from vllm_antkv.ops import cpu

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "vllm_antkv" / "csrc" / "cpu"
#: With these, csrc/cpu/tiles has tile registers; those of the build for tiles (setup.py).
AMX_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni", "-mamx-tile", "-mamx-bf16")


class Instruction(IntEnum):
    """`Kind` of emulator.cpp."""

    LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS = range(7)


class Mistake(IntEnum):
    """What the emulated processor can be made to do wrong."""

    NONE, KEEPS_DENORMALS, SWAPS_PAIRS, FORGETS_SUMS, IGNORES_STRIDES, FORGETS_CONFIGURATION = range(6)


@cache
def compiled(name: str, *flags: str) -> ctypes.CDLL:
    """A C++ file of this folder."""
    source = HERE / f"{name}.cpp"

    def build(folder: Path) -> None:
        command = ["g++", "-std=c++17", "-O3", "-shared", "-fPIC", "-w", *flags, f"-I{CSRC}", source]
        subprocess.run([*command, "-o", folder / "made"], check=True)

    return ctypes.CDLL(str(made(build, repr(flags).encode() + source.read_bytes())))


def made(build: Callable[[Path], None], of: bytes) -> Path:
    """What `build` makes (`kept`) of the kernels and what else it names."""
    return kept("amx", cpu.digest(cpu._CSRC).encode() + of, build)


def emulator() -> ctypes.CDLL:
    """The emulator, which takes care of tile instructions from now on."""
    library = compiled("emulator")
    library.emulator_count.restype = ctypes.c_uint64
    library.emulator_install()
    return library


def is_real() -> bool:
    """Whether this processor has AMX, and its Linux permits it."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16") and torch.cpu._init_amx())


def runs() -> bool:
    """Whether there is AMX within `amx()`, and all else that is needed for it."""
    has = torch.cpu.get_capabilities()
    beside = {feature for feature in cpu.VARIANTS[0].features if not feature.startswith("amx")}
    return all(has.get(feature) for feature in beside) and (is_real() or shutil.which("g++") is not None)


@contextmanager
def amx() -> Iterator[None]:
    """Within this, whoever asks PyTorch is told that there is AMX where it `runs`: in the processor, or emulated.

    What was made meanwhile stays usable. Libraries that ask the processor itself, as PyTorch's do, are told nothing.
    """
    if is_real() or not runs():
        yield
        return
    library, has = emulator(), torch.cpu.get_capabilities()

    def permit() -> bool:
        library.emulator_permit(True)
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", lambda: {**has, "amx_tile": True, "amx_bf16": True})
        patch.setattr(torch.cpu, "_init_amx", permit)
        yield


@contextmanager
def mistaken(mistake: Mistake) -> Iterator[None]:
    """Within this, the emulated processor makes a mistake."""
    emulator().emulator_mistake(mistake)
    try:
        yield
    finally:
        emulator().emulator_mistake(Mistake.NONE)
