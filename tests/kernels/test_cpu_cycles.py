"""What `benchmarks/cpu_cycles.py` follows and counts, of functions whose instructions are known."""

import ctypes
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from benchmarks.cpu_cycles import Listing, simulated

LLVM = "-19"
TOOLS = ("g++", f"llvm-objdump{LLVM}", f"llvm-mca{LLVM}")
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}: on Debian, g++ and llvm-19"
)

#: chain(n): n products, each of the one before. store(rows, stride): a tile, then a no-operation unless that begins
#: with what was there.
SOURCE = r"""
asm(".globl chain\nchain: mov $3, %eax\n1: imul %eax, %eax\ndec %edi\njnz 1b\nret\n"
    ".globl store\nstore: tilestored %tmm0, (%rdi,%rsi,1)\ncmpl $7, (%rdi)\nje 1f\nnop\n1: ret\n");
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("cycles") / "known.so"
    subprocess.run(["g++", "-shared", "-x", "c++", "-", "-o", path], input=SOURCE, text=True, check=True)
    return ctypes.CDLL(str(path))


def executed(library: ctypes.CDLL, name: str, *arguments) -> list[str]:
    """The instructions of a call."""
    function = library[name]
    call, entry = partial(function, *arguments), ctypes.cast(function, ctypes.c_void_p).value
    return Listing(Path(library._name), LLVM).executed(entry, call)


def test_what_a_call_executes_is_listed_turn_by_turn(library):
    names = [text.split()[0] for text in executed(library, "chain", 5)]
    assert names == ["movl", *["imull", "decl", "jne"] * 5, "retq"]


@pytest.mark.parametrize("processor", ["sapphirerapids", "znver4"])
def test_a_chain_of_products_takes_three_cycles_each(library, processor):
    chains = [executed(library, "chain", count) for count in (100, 300)]
    short, long = (simulated(chain, processor, LLVM) for chain in chains)
    assert long - short == pytest.approx(3 * 200, rel=0.02)


def test_a_tile_that_is_stored_is_other_numbers(library):
    rows = (ctypes.c_int32 * 256)(*[7] * 256)
    names = [text.split()[0] for text in executed(library, "store", rows, ctypes.c_int64(64))]
    assert names == ["tilestored", "cmpl", "je", "nop", "retq"]
    assert rows[0] == 7, "only the copy of this process went on"


def test_rows_of_tiles_are_loads_and_products_are_counted_apart():
    loads = ["tileloadd\t(%rax,%rcx), %tmm1"] * 100
    count = partial(simulated, processor="sapphirerapids", llvm=LLVM)
    assert count(loads) >= 1600 / 3, "three loads start in a cycle at most"
    assert count([*loads, *["tdpbf16ps\t%tmm1, %tmm2, %tmm0"] * 1000]) == count(loads)
