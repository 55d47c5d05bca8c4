"""The GPU that a benchmark needs, and the file that it writes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from vllm_antkv.evaluate.report import versions, write_json

ROOT = Path(__file__).parents[2]


def require_gpu() -> None:
    """End the program with one sentence where there is no CUDA device."""
    if not torch.cuda.is_available():
        sys.exit("No CUDA device was found: run this on a machine with an NVIDIA GPU and a PyTorch for CUDA.")


def machine() -> dict[str, Any]:
    """The GPU, its driver, and the versions of what runs on it; without one, a CPU tries a benchmark out."""
    software = versions("torch", "triton", "vllm", "transformers", "cupy-cuda13x")
    if not torch.cuda.is_available():
        return {"gpu": "no GPU", "memory_gib": 0, "driver": None, "versions": software}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "versions": software,
    }


def described() -> str:
    """The machine and the commit in a line."""
    details = machine()
    packages = ", ".join(f"{name} {version}" for name, version in details["versions"].items())
    return f"{details['gpu']}, {details['memory_gib']} GiB, driver {details['driver']}; {packages}; commit {commit()}."


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Write what was measured, and on what, where a file was asked for."""
    if path is not None:
        write_json(path, {"machine": machine(), "commit": commit(), **report})


def commit() -> str | None:
    """The commit of the checkout, with a mark where files differ from it; None where there is no git."""
    return _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"])


def _said(command: list[str]) -> str | None:
    """The first line that a program prints; None where it is missing or fails, for which no result should be lost."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (FileNotFoundError, subprocess.CalledProcessError, IndexError):
        return None


if __name__ == "__main__":
    require_gpu()
    print(described())
