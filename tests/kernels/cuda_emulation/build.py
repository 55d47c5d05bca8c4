"""Compiles kernels with g++ against `emulation.h`, under watch: races, undefined behaviour."""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "csrc" / "cuda"
_LIBRARIES = HERE.parents[2] / ".pytest_cache" / "cuda_emulation"
_FLAGS = ("-std=c++17", "-O1", "-g", "-march=native", "-fno-strict-aliasing", "-fno-threadsafe-statics", "-w", "-fPIC")
#: races.cpp stands in for the runtime of -fsanitize=thread. Undefined behaviour ends the process.
_WATCHES = ("-fsanitize=thread", "-fsanitize=alignment,bounds,shift,null", "-fno-sanitize-recover=all")


def library_of(names: Sequence[str], definitions: Sequence[str]) -> Path:
    """The library of C++ files of this folder: compiled once for what it is made of, whoever asks first."""
    sources = [
        path for folder in (HERE, SOURCES) for path in sorted(folder.iterdir()) if path.suffix[:2] in (".c", ".h")
    ]
    made_of = hashlib.sha256(repr((names, _FLAGS, _WATCHES, definitions)).encode())
    made_of.update(subprocess.run(["g++", "-Q", "-march=native", "--help=target"], capture_output=True).stdout)
    for path in sources:
        made_of.update(path.read_bytes())
    library = _LIBRARIES / f"{made_of.hexdigest()}.so"
    if not library.exists():
        _LIBRARIES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_LIBRARIES) as folder:
            compile_kernels([HERE / f"{name}.cpp" for name in names], Path(folder, "kernels.so"), definitions)
            os.replace(Path(folder, "kernels.so"), library)
    return library


def compile_kernels(files: Sequence[Path], to: Path, definitions: Sequence[str] = ()) -> None:
    """Compile C++ files and the kernels that they include: a program where `to` has no suffix, else a library."""
    flags = ["g++", *_FLAGS, "-DANTKV_EMULATION", f"-I{HERE}", f"-I{SOURCES}", *definitions]
    objects = []
    for file in (*files, HERE / "races.cpp"):
        objects.append(to.with_name(f"{file.stem}.o"))
        watches = _WATCHES if file in files else ()
        _run([*flags, *watches, "-c", str(file), "-o", str(objects[-1])])
    _run(["g++", *(["-shared"] if to.suffix else []), *map(str, objects), "-lubsan", "-ldl", "-o", str(to)])


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
