"""Compile every CUDA kernel with nvcc, without a GPU, and read what it takes: registers, shared memory, spills.

python scripts/compile_cuda.py                    print the table
python scripts/compile_cuda.py --write FILE       record it
python scripts/compile_cuda.py --check FILE       compare with a record; exit status 1 when something got worse
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from vllm_antkv.ops.cuda_build import Build

SOURCES = Path(__file__).parents[1] / "vllm_antkv" / "csrc" / "cuda"
_MADE = Path(__file__).parents[1] / ".pytest_cache" / "nvcc"
#: Compute capability and the most shared memory of a CTA, in bytes.
ARCHITECTURES = {"80": 166912, "90": 232448}
BUILDS = (
    Build(128, 4, 8, 256, bfloat16=True, fp8=False, bulk=True),
    Build(128, 4, 4, 256, bfloat16=True, fp8=False, bulk=True),
    Build(128, 4, 8, 256, bfloat16=True, fp8=True, bulk=True),
    Build(128, 1, 8, 256, bfloat16=True, fp8=False, bulk=True),
    Build(128, 8, 8, 256, bfloat16=True, fp8=False, bulk=True),
    Build(128, 16, 8, 256, bfloat16=True, fp8=False, bulk=True),
    Build(64, 4, 8, 256, bfloat16=False, fp8=False, bulk=True),
    Build(64, 7, 4, 256, bfloat16=True, fp8=False, bulk=True),
    Build(128, 4, 16, 4096, bfloat16=True, fp8=True, bulk=True),
    Build(128, 16, 16, 4096, bfloat16=True, fp8=True, bulk=True),
    Build(128, 4, 32, 4096, bfloat16=True, fp8=True, bulk=True),
    Build(64, 7, 32, 4096, bfloat16=False, fp8=True, bulk=True),
)
#: Registers may move by this share between compiler versions before a check fails.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel: registers and bytes of stack and spills per thread, bytes of shared memory per CTA."""

    registers: int
    stack: int
    spills: int
    shared: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="record the table")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with a record")
    parser.add_argument("--arch", nargs="*", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--layer", nargs="*", help="only these layers, by the name in the table")
    arguments = parser.parse_args()
    table = measure(arguments.arch, [b for b in BUILDS if not arguments.layer or name_of(b) in arguments.layer])
    print_table(table)
    if arguments.write:
        arguments.write.write_text(json.dumps({key: vars(value) for key, value in table.items()}, indent=1) + "\n")
    if arguments.check:
        complaints = compare(table, json.loads(arguments.check.read_text()))
        print("\n".join(complaints) or f"{len(table)} kernels agree with {arguments.check}")
        return int(bool(complaints))
    return 0


def name_of(build: Build) -> str:
    """Short, for the table."""
    parts = [f"d{build.sub_vector_size}c{build.num_centroids}", f"h{build.head_size}", f"g{build.group}"]
    parts += [] if build.bfloat16 else ["float16"]
    parts += ["fp8"] if build.fp8 and build.stages_tables else []
    return " ".join(parts)


def measure(architectures: Iterable[str], builds: Iterable[Build]) -> dict[str, Resources]:
    """Compile everything; keys are `kernel | layer | sm_xx`."""
    table = {}
    for architecture in architectures:
        for build in builds:
            fitted = replace(build, bulk=architecture >= "90").fitted(ARCHITECTURES[architecture])
            clustered = fitted.in_clusters(ARCHITECTURES[architecture])
            kinds = [("decode", fitted), ("encode_store", fitted.of_coding())]
            for source, needed in kinds + ([("decode", clustered)] if clustered else []):
                for kernel, resources in compile_source(source, needed, architecture).items():
                    warps = f" {needed.warps} warps" if kernel == "decode" else ""
                    in_clusters = f" clusters of {needed.cluster}" if needed.cluster > 1 and warps else ""
                    table[f"{kernel} | {name_of(build)}{in_clusters}{warps} | sm_{architecture}"] = resources
    return table


def nvcc() -> str | None:
    """The compiler on the PATH, else the one of the packages nvidia-*; None where there is none."""
    installed = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvcc")
    return shutil.which("nvcc") or shutil.which(installed)


def compiled(source: Path, *options: str) -> tuple[Path, str]:
    """The machine code of a CUDA source with its lines, and what nvcc said of its resources.

    Both are kept under the hash of what they are made of.

    Raises SystemExit, with what nvcc said, where it failed.
    """
    # All that anybody asks for, so that who asks for lines takes what was compiled for the resources.
    asked = ("-lineinfo", "-Xptxas", "-v")
    command = [nvcc() or "nvcc", "-cubin", "-std=c++17", f"-I{SOURCES}", *asked, *options, str(source)]
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


@cache
def compile_source(source: str, build: Build, architecture: str) -> dict[str, Resources]:
    """The kernels of csrc/cuda/<source>.cu."""
    definitions = [f"-D{name}={value}" for name, value in build.definitions.items()]
    _, said = compiled(SOURCES / f"{source}.cu", f"-arch=sm_{architecture}", *definitions)
    if "warning" in said:
        raise SystemExit(said)
    shared = {"decode": build.decode_shared_bytes, "encode_store": build.encode_shared_bytes}
    pattern = r"properties for antkv_(\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers"
    return {
        name: Resources(int(registers), int(stack), int(spills), shared.get(name, 0))
        for name, stack, spills, registers in re.findall(pattern, said, re.DOTALL)
    }


def compare(table: dict[str, Resources], record: dict[str, dict[str, int]]) -> list[str]:
    """What is worse than recorded."""
    complaints = []
    for key, now in table.items():
        if key not in record:
            complaints.append(f"{key}: not recorded")
            continue
        then = Resources(**record[key])
        for name, share in (("registers", TOLERANCE), ("stack", 0), ("spills", TOLERANCE), ("shared", 0)):
            if getattr(now, name) > getattr(then, name) * (1 + share):
                complaints.append(f"{key}: {name} {getattr(now, name)}, recorded {getattr(then, name)}")
    return complaints


def print_table(table: dict[str, Resources]) -> None:
    width = max(len(key) for key in table)
    print(f"{'kernel | layer | architecture':{width}}  registers  stack  spills  shared")
    for key, value in table.items():
        print(f"{key:{width}}  {value.registers:9}  {value.stack:5}  {value.spills:6}  {value.shared:6}")


if __name__ == "__main__":
    sys.exit(main())
