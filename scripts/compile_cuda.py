"""Compile the CUDA kernels with nvcc, without a GPU, and read what they spill."""

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from vllm_antkv.ops.cuda_build import Build

SOURCES = Path(__file__).parents[1] / "vllm_antkv" / "csrc" / "cuda"
_MADE = Path(__file__).parents[1] / ".pytest_cache" / "nvcc"


def nvcc() -> str | None:
    """The compiler on the PATH, else the one of the packages nvidia-*; None where there is none."""
    installed = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvcc")
    return shutil.which("nvcc") or shutil.which(installed)


def compiled(source: Path, *options: str) -> tuple[Path, str]:
    """The machine code of a CUDA source with its lines, and what nvcc said of its resources.

    Both are kept under the hash of what they are made of.

    Raises SystemExit, with what nvcc said, where it failed.
    """
    command = [
        nvcc() or "nvcc",
        *("-cubin", "-std=c++17", f"-I{SOURCES}", "-lineinfo", "-Xptxas", "-v"),
        *options,
        str(source),
    ]
    made_of = [
        repr(command).encode(),
        _compiler(),
        source.read_bytes(),
        *(p.read_bytes() for p in sorted(SOURCES.iterdir())),
    ]
    code = _MADE / f"{hashlib.sha256(b''.join(made_of)).hexdigest()}.cubin"
    said = code.with_suffix(".txt")
    if not code.exists():
        _MADE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_MADE) as folder:
            made = Path(folder, "kernels.cubin")
            report = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if report.returncode:
                raise SystemExit(report.stderr)
            made.with_suffix(".txt").write_text(report.stderr)
            os.replace(made.with_suffix(".txt"), said)
            os.replace(made, code)
    return code, said.read_text()


@cache
def _compiler() -> bytes:
    return subprocess.run([nvcc() or "nvcc", "--version"], capture_output=True, check=True).stdout


def spills(source: str, build: Build, architecture: int) -> dict[str, int]:
    """Bytes per thread that each kernel of csrc/cuda/<source>.cu spills.

    Raises SystemExit where nvcc failed or warned.
    """
    definitions = [f"-D{name}={value}" for name, value in build.definitions.items()]
    _, said = compiled(SOURCES / f"{source}.cu", f"-arch=sm_{architecture}", *definitions)
    if "warning" in said:
        raise SystemExit(said)
    stores = re.findall(r"properties for antkv_(\w+)\s+\d+ bytes stack frame, (\d+) bytes spill stores", said)
    return {kernel: int(stored) for kernel, stored in stores}
