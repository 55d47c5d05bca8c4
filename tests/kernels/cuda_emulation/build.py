"""Compiles kernels with g++ against `emulation.h`, plainly or under one of the watches."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "csrc" / "cuda"
_FLAGS = ("-std=c++17", "-O1", "-march=native", "-fno-strict-aliasing", "-w", "-fPIC", "-DANTKV_EMULATION")
#: Watches: what they add to the compilation of the kernels. Races are found by races.cpp, which stands in for the
#: runtime of -fsanitize=thread; undefined behaviour ends the process.
WATCHES = {
    "none": (),
    "races": ("-g", "-DANTKV_RACES", "-fno-threadsafe-statics", "-fsanitize=thread"),
    "undefined": ("-g", "-fsanitize=alignment,bounds,shift,null", "-fno-sanitize-recover=all"),
}


def compile_kernels(
    files: Sequence[Path], to: Path, definitions: Sequence[str] = (), watch: str = "none", sources: Path = SOURCES
) -> None:
    """Compile C++ files against the kernels in `sources`: a program where `to` has no suffix, else a shared library."""
    flags = [*_FLAGS, f"-I{HERE}", f"-I{sources}", *definitions]
    linked = ["-shared"] if to.suffix else []
    if watch != "races":
        _run(["g++", *flags, *WATCHES[watch], *linked, *map(str, files), "-o", str(to)])
        return
    # The detector itself is not watched.
    objects = []
    for file in (*files, HERE / "races.cpp"):
        objects.append(to.with_name(f"{file.stem}.o"))
        watched = [flag for flag in WATCHES[watch] if file in files or "sanitize" not in flag]
        _run(["g++", *flags, *watched, "-c", str(file), "-o", str(objects[-1])])
    _run(["g++", *linked, *map(str, objects), "-ldl", "-o", str(to)])


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
