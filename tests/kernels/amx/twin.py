"""The build for tiles with plain C++ in the place of tile registers, and all else as it is."""

import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.kernels.amx.emulated import AMX_FLAGS, CSRC, made
from vllm_antkv.ops import cpu

_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fopenmp", "-w", *AMX_FLAGS, '-DANTKV_SOURCES_DIGEST=""')
_REGISTERS = """#pragma once
#include "plain.h"
namespace antkv { using AmxTiles = RegisterTiles<PlainRegisters>; }
"""


@dataclass(frozen=True)
class Twin(cpu.Variant):
    """The `amx` variant, but for its registers."""

    @property
    def path(self) -> Path:
        """Where the library is, made when it is first asked for."""
        return _library()


TWIN = Twin("amx in plain C++", "twin", cpu.VARIANTS[0].tiles, ())


@cache
def _library() -> Path:
    return made(_build, repr((_FLAGS, _REGISTERS)).encode())


def _build(folder: Path) -> None:
    shutil.copytree(CSRC, folder / "cpu")
    (folder / "cpu/tiles/amx.h").write_text(_REGISTERS)
    for source in sorted(folder.glob("cpu/*.cpp")):
        subprocess.run(["g++", *_FLAGS, "-c", source, "-o", source.with_suffix(".o")], check=True)
    subprocess.run(["g++", "-shared", *folder.glob("cpu/*.o"), "-o", folder / "made"], check=True)
