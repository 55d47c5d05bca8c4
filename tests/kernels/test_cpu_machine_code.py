"""What the compiler made of the loops that decode codes: the objects that the installed kernels were linked from."""

import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

_OBJECTS = Path("build", "objects")
#: What a loop over tokens does with a code.
_LOOK_UP = re.compile(r"\b(Centroids::|code_at$|sixteen_channels$|FixedLogits::(rotated_key|channels)$)")
#: The loops themselves, and what they may call: nothing for each token.
_LOOPS = ("::multiply<Centroids", "add_in_tiles<", "add_by_histogram<", "add_to_bins<", "dot_rotated<")
_ONCE_IN_MANY_TOKENS = ("memchr", "memcpy", "memset", "void deinterleave<4>")

pytestmark = pytest.mark.skipif(
    not any(Path("vllm_antkv", "ops").glob("_cpu_*.so")), reason="the C++ kernels were not built: no compiler"
)


@cache
def _calls(library: str) -> dict[str, set[str]]:
    """For every function of decode.cpp in a library, what it calls."""
    path = _OBJECTS / f"vllm_antkv.ops._cpu_{library}" / "vllm_antkv" / "csrc" / "cpu" / "decode.o"
    assert path.is_file(), f"no {path}: make venv builds it"
    command = ["objdump", "--disassemble", "--reloc", "--no-show-raw-insn", "--demangle", str(path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    calls: dict[str, set[str]] = defaultdict(set)
    function, called = "", ""
    for line in lines:
        if head := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            function = _plain(head[1])
            calls[function] |= set()
        elif call := re.search(r"\tcall +\S+ <(.*?)(\+0x[0-9a-f]+)?>$", line):
            # A function of another section, where an offset stands, is named by the line below.
            called = call[1]
            if not call[2]:
                calls[function].add(_plain(called))
        elif called and (target := re.search(r"R_X86_64_(?:PLT32|PC32)\s+(.*?)(?:[-+]0x[0-9a-f]+)?$", line)):
            calls[function].add(_plain(target[1]))
            called = ""
        else:
            called = ""
    return calls


def _plain(name: str) -> str:
    return re.sub(r"antkv::|\(anonymous namespace\)::", "", name)


def _without_arguments(name: str) -> str:
    """A function's name without those of its template and its own."""
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    return name.split("(")[0]


@pytest.mark.parametrize("library", ["avx2", "avx512", "tiles"])
def test_no_look_up_of_a_code_is_a_function_of_its_own(library):
    names = [_without_arguments(name) for name in _calls(library)]
    assert "void FixedLogits::multiply" in names
    assert not [name for name in names if _LOOK_UP.search(name)]


@pytest.mark.parametrize("library", ["avx512", "tiles"])
def test_loops_over_tokens_call_nothing_for_each_of_them(library):
    loops = {
        name: called for name, called in _calls(library).items() if any(loop in name.split("(")[0] for loop in _LOOPS)
    }
    assert any("multiply<Centroids<8, false>" in name for name in loops)
    calls = {call for called in loops.values() for call in called}
    assert not [call for call in calls if not call.startswith(_ONCE_IN_MANY_TOKENS)]
