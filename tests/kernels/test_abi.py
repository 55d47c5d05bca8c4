"""The structures of the CUDA kernels are laid out as those that Python hands over."""

import ctypes
import shutil
import subprocess
from itertools import chain

import pytest

from tests.kernels.cuda_emulation.build import HERE, SOURCES
from vllm_antkv.ops.cuda_arguments import LayerArgument, ResultsArgument
from vllm_antkv.ops.cuda_build import Build
from vllm_antkv.ops.rows import RowsArgument
from vllm_antkv.ops.step import StepArgument

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

CUDA = {"Layer": LayerArgument, "Step": StepArgument, "Rows": RowsArgument, "Results": ResultsArgument}


def assertions(name: str, structure: type[ctypes.Structure]) -> list[str]:
    """C++ that compiles only where `name` is laid out like `structure`."""
    fields = [(field[0], getattr(structure, field[0]).offset) for field in structure._fields_]
    places = [f"static_assert(__builtin_offsetof({name}, {field}) == {offset});" for field, offset in fields]
    return [f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});", *places]


def errors(text: str, *options: str) -> str:
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", *options, "-x", "c++", "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True).stderr


def test_cuda_structures():
    build = Build(128, 4, 8, 256, bfloat16=True, bulk=True).fitted(232448)
    options = ["-march=x86-64-v3", "-DANTKV_EMULATION", f"-I{HERE}", f"-I{SOURCES}"]
    options += [f"-D{macro}={value}" for macro, value in build.definitions.items()]
    lines = ['#include "layer.cuh"', *chain.from_iterable(assertions(*named) for named in CUDA.items())]
    assert errors("\n".join(lines), *options) == ""
    wrong = [f"static_assert(sizeof({name}) == 1);" for name in CUDA]
    assert errors("\n".join([*lines, *wrong]), *options).count("static assertion failed") == len(CUDA)
