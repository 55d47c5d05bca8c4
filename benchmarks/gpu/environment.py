"""Is everything there that the GPU check needs? Prints what was found; the exit status is 1 when something is missing.

python -m benchmarks.gpu.environment
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import machine, require_gpu, write_report

_ADD_ONE = r'extern "C" __global__ void add_one(float* x) { x[blockIdx.x * blockDim.x + threadIdx.x] += 1.0f; }'


def main() -> int:
    """Try everything, print it, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    arguments = parser.parse_args()
    require_gpu()
    checks = {"CuPy": _cupy, "Triton": _triton, "vLLM": _vllm, "FlashAttention": _flash_attention, "plugin": _plugin}
    found = {name: _tried(check) for name, check in checks.items()}
    print(json.dumps({**machine(), **found}, indent=2))
    write_report(arguments.json, {"found": found})
    return int(any("error" in result for result in found.values()))


def _tried(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return check()
    except Exception as error:
        # Everything that is missing should be known after one run.
        return {"error": f"{type(error).__name__}: {error}"}


def _cupy() -> dict[str, Any]:
    """A kernel is compiled, loaded, and run on a tensor and the stream of PyTorch's."""
    cupy = importlib.import_module("cupy")
    values = torch.zeros(256, device="cuda")
    kernel = cupy.RawModule(code=_ADD_ONE).get_function("add_one")
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        kernel((2,), (128,), (cupy.from_dlpack(values),))
    torch.cuda.synchronize()
    if not bool((values == 1).all()):
        raise ArithmeticError("the kernel did not do what it says")
    return {"nvrtc": list(cupy.cuda.nvrtc.getVersion())}


def _triton() -> dict[str, Any]:
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return {"backend": target.backend, "architecture": target.arch}


def _vllm() -> dict[str, Any]:
    from vllm.entrypoints.llm import LLM
    from vllm.platforms import current_platform

    return {"platform": type(current_platform).__name__, "device": current_platform.device_name, "entry": LLM.__name__}


def _flash_attention() -> dict[str, Any]:
    from vllm.vllm_flash_attn import fa_version_unsupported_reason, is_fa_version_supported

    reasons = {
        str(version): "yes" if is_fa_version_supported(version) else fa_version_unsupported_reason(version)
        for version in (2, 3)
    }
    if reasons["3"] != "yes" and torch.cuda.get_device_capability()[0] == 9:
        raise ImportError(f"FlashAttention 3 cannot be used: {reasons['3']}")
    return reasons


def _plugin() -> dict[str, Any]:
    found = [point.value for point in entry_points(group="vllm.general_plugins") if point.name == "antkv"]
    if not found:
        raise ImportError("vLLM does not see the plugin: install this checkout (pip install --editable .)")
    return {"entry point": found[0]}


if __name__ == "__main__":
    sys.exit(main())
