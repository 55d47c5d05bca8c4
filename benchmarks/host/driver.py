"""A GPU that is not there: Triton and the CUDA kernels launch through NVIDIA's driver, whose place `driver.c` takes.

Triton binds, specialises and packs arguments as on a GPU, with its own launcher in C; kernels are not compiled, which
happens once and before anybody waits. The CUDA kernels, which CuPy would hand to the driver, go straight to it: about a
microsecond less.
"""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm_antkv.ops.cuda_backend import Argument
from vllm_antkv.ops.cuda_build import Build

#: An H200: compute capability, multiprocessors, shared memory of a CTA.
CAPABILITY, MULTIPROCESSORS, SHARED_BYTES = (9, 0), 132, 232448


@cache
def driver() -> ctypes.CDLL:
    """The stand-in; whoever looks for libcuda.so.1 from now on finds it."""
    source = Path(__file__).with_name("driver.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        command = ["gcc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        with patch.dict(os.environ, TRITON_LIBCUDA_PATH=folder, TRITON_CACHE_DIR=folder):
            _use_in_triton()
    return loaded


def num_launches() -> int:
    """Of kernels, in this process so far."""
    return ctypes.c_int64.in_dll(driver(), "num_launches").value


class CountingBackend:
    """Where the CUDA kernels run: see `vllm_antkv.ops.cuda_backend.Backend`."""

    multiprocessors = MULTIPROCESSORS
    shared_bytes = SHARED_BYTES
    capability = CAPABILITY

    def load(self, build: Build) -> None:
        """Nothing is needed."""

    def launch(
        self, build: Build, kernel: str, grid: tuple[int, ...], threads: int, shared: int, arguments: Sequence[Argument]
    ) -> None:
        """Count it."""
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        sizes = (*grid, 1, 1)[:3]
        driver().cuLaunchKernel(None, *sizes, threads, 1, 1, shared, None, addresses, None)


def _use_in_triton() -> None:
    from triton import compiler, runtime
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    class Driver(CudaDriver):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    class Launchable:
        """What Triton makes of a kernel, without machine code."""

        function, packed_metadata = 1, (4, 1, 0)

        def __init__(self, src: Any, **options: Any) -> None:
            # What its launches look at: the globals that it uses.
            src.hash()
            sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
            alignments = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
            launched = {"launch_cooperative_grid": False, "launch_pdl": False, "instrumentation_mode": ""}
            self.run = CudaLauncher(src, SimpleNamespace(num_ctas=1, **sizes, **alignments, **launched))

        def launch_metadata(self, grid: tuple[int, ...], stream: int, *arguments: Any) -> None:
            """As of a kernel that nobody profiles."""

    runtime.driver.set_active(Driver())
    compiler.compile = Launchable
