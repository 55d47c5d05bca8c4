"""Compiles kernels with g++ against `emulation.h`, under watch: races, undefined behaviour.

Whatever is made is kept under the hash of what it is made of.
"""

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.kernels.kept import kept

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "vllm_antkv" / "csrc" / "cuda"
_FLAGS = ("-std=c++17", "-g1", "-march=native", "-fno-strict-aliasing", "-fno-threadsafe-statics", "-w", "-fPIC")
#: races.cpp stands in for the runtime of -fsanitize=thread. Undefined behaviour ends the process.
_WATCHED = ("-O1", "-fsanitize=thread", "-fsanitize=alignment,bounds,shift,null", "-fno-sanitize-recover=all")
_DETECTOR = ("-O3",)


def library_of(parts: Mapping[str, Sequence[str]]) -> Path:
    """The library of C++ files of this folder, by name, and the kernels that they include. parts: their definitions."""
    return _linked([_watched_object_of(name, definitions) for name, definitions in parts.items()], ["-shared"])


def program_of(name: str) -> Path:
    """The program of a C++ file of this folder and the kernels that it includes."""
    return _linked([_watched_object_of(name)], [])


def _watched_object_of(name: str, definitions: Sequence[str] = ()) -> Path:
    """With the standard library as it was read once for all of them."""
    standard = _made(["g++", *_FLAGS, *_WATCHED, "-x", "c++-header", f"{HERE}/standard.h"], _sources(), ".gch")
    return _object_of(name, (*_WATCHED, "-include", str(standard.with_suffix("")), *definitions))


def _object_of(name: str, options: Sequence[str]) -> Path:
    command = ["g++", *_FLAGS, *options, "-DANTKV_EMULATION", f"-I{HERE}", f"-I{SOURCES}", "-c", f"{HERE}/{name}.cpp"]
    return _made(command, _sources())


def _linked(objects: Sequence[Path], kind: Sequence[str]) -> Path:
    detector = _object_of("races", _DETECTOR)
    return _made(["g++", *kind, *map(str, (*objects, detector)), "-lubsan", "-ldl"])


def _made(command: Sequence[str], of: bytes = b"", suffix: str = "") -> Path:
    def build(folder: Path) -> None:
        result = subprocess.run([*command, "-o", f"{folder}/made"], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr

    return kept("cuda_emulation", repr(command).encode() + of, build, suffix)


@cache
def _sources() -> bytes:
    """What objects are made of beside their options: all sources, and what -march=native means here."""
    content = [subprocess.run(["g++", "-Q", "-march=native", "--help=target"], capture_output=True).stdout]
    for folder in (HERE, SOURCES):
        content += [path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix[:2] in (".c", ".h")]
    return hashlib.sha256(b"".join(content)).digest()
