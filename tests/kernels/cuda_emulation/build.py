"""Compiles kernels with g++ against `emulation.h`; undefined behaviour ends the process.

Whatever is made is kept under the hash of what it is made of.
"""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.places import ROOT

HERE = Path(__file__).parent
SOURCES = ROOT / "vllm_antkv" / "csrc" / "cuda"
#: For the next run.
_KEPT = ROOT / ".pytest_cache" / "cuda_emulation"
_FLAGS = ("-std=c++17", "-g1", "-march=native", "-fno-strict-aliasing", "-fno-threadsafe-statics", "-w", "-fPIC")
_WATCHED = ("-O1", "-fsanitize=alignment,bounds,shift,null", "-fno-sanitize-recover=all")


def library_of(parts: Mapping[str, Sequence[str]]) -> Path:
    """The library of C++ files of this folder, by name, and the kernels that they include. parts: their definitions."""
    objects = [_object_of(name, definitions) for name, definitions in parts.items()]
    return _made(["g++", "-shared", *map(str, objects), "-lubsan"])


def _object_of(name: str, definitions: Sequence[str]) -> Path:
    """With the standard library as it was read once for all of them."""
    standard = _made(["g++", *_FLAGS, *_WATCHED, "-x", "c++-header", f"{HERE}/standard.h"], _sources(), ".gch")
    folders = ("-include", str(standard.with_suffix("")), f"-I{HERE}", f"-I{SOURCES}")
    command = ["g++", *_FLAGS, *_WATCHED, *folders, *definitions, "-DANTKV_EMULATION", "-c", f"{HERE}/{name}.cpp"]
    return _made(command, _sources())


def _made(command: Sequence[str], of: bytes = b"", suffix: str = "") -> Path:
    """What a command makes; of: beside itself. Several processes may run it at once."""
    path = _KEPT / f"{hashlib.sha256(repr(command).encode() + of).hexdigest()}{suffix}"
    if not path.exists():
        _KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT) as folder:
            result = subprocess.run([*command, "-o", f"{folder}/made"], capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            os.replace(f"{folder}/made", path)
    return path


@cache
def _sources() -> bytes:
    """What objects are made of beside their options: all sources, and what -march=native means here."""
    content = [subprocess.run(["g++", "-Q", "-march=native", "--help=target"], capture_output=True).stdout]
    for folder in (HERE, SOURCES):
        content += [path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix[:2] in (".c", ".h")]
    return hashlib.sha256(b"".join(content)).digest()
