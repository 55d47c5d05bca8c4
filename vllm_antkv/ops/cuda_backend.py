"""Where the CUDA kernels run: they are compiled with NVRTC through CuPy, once per machine, and launched through CuPy.

The machine code is kept in the user's cache. Launches go to PyTorch's current stream and wait for nothing. With
ANTKV_CHECK=1 in the environment kernels check the blocks that they are handed, and name the line where one is wrong.
"""

import ctypes
import hashlib
import importlib
import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from platformdirs import user_cache_path

from vllm_antkv.ops.cuda_build import Build
from vllm_antkv.whole_file import write_whole

#: What a kernel takes: structures by value, integers of 64 bits, addresses.
Argument = ctypes.Structure | ctypes.c_int64 | ctypes.c_void_p


class Backend(Protocol):
    """Where kernels run: a GPU, or the emulation of one in tests.

    multiprocessors: CTAs that run at a time.
    shared_bytes: the most shared memory of a CTA.
    capability: compute capability.
    """

    multiprocessors: int
    shared_bytes: int
    capability: tuple[int, int]

    def load(self, build: Build) -> None:
        """Make the kernels of a build ready."""
        ...

    def launch(
        self, build: Build, kernel: str, grid: tuple[int, ...], threads: int, shared: int, arguments: Sequence[Argument]
    ) -> None:
        """Start a kernel."""
        ...


class CudaBackend:
    """See `Backend`."""

    def __init__(self, device: torch.device) -> None:
        cupy = importlib.import_module("cupy")
        properties = torch.cuda.get_device_properties(device)
        self.multiprocessors: int = properties.multi_processor_count
        self.shared_bytes: int = cupy.cuda.Device(device.index).attributes["MaxSharedMemoryPerBlockOptin"]
        self.capability: tuple[int, int] = (properties.major, properties.minor)
        self._device = device
        self._architecture = f"sm_{properties.major}{properties.minor}"
        self._launch = cupy.cuda.driver.launchKernel
        #: With their addresses.
        self._kernels: dict[tuple[Build, str], tuple[Any, int]] = {}

    def load(self, build: Build) -> None:
        """See `Backend`."""
        if (build, "antkv_decode") in self._kernels:
            return
        cupy = importlib.import_module("cupy")
        with torch.cuda.device(self._device):
            for source in ("encode_store", "decode"):
                module = cupy.RawModule(path=str(cubin(source, build, self._architecture)))
                kernel = module.get_function(f"antkv_{source}")
                self._kernels[build, f"antkv_{source}"] = kernel, kernel.kernel.ptr
            decode, _ = self._kernels[build, "antkv_decode"]
            decode.max_dynamic_shared_size_bytes = build.decode_shared_bytes

    def launch(
        self, build: Build, kernel: str, grid: tuple[int, ...], threads: int, shared: int, arguments: Sequence[Argument]
    ) -> None:
        """See `Backend`."""
        _, function = self._kernels[build, kernel]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        # As the driver takes them: CuPy's own way looks at every argument.
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._launch(function, *(*grid, 1, 1)[:3], threads, 1, 1, shared, stream, ctypes.addressof(addresses), 0)


def cubin(source: str, build: Build, architecture: str) -> Path:
    """Machine code of csrc/cuda/<source>.cu, compiled where the user's cache does not hold it."""
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    folder = importlib.resources.files("vllm_antkv.csrc") / "cuda"
    headers = {file.name.encode(): file.read_bytes() for file in folder.iterdir() if file.name.endswith(".cuh")}
    text = (folder / f"{source}.cu").read_text()
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in build.definitions.items()]
    if os.environ.get("ANTKV_CHECK", "0") != "0":
        options += ["-DANTKV_CHECK", "-lineinfo"]
    identity = repr((nvrtc.getVersion(), options, text, sorted(headers.items())))
    name = f"{source}-{architecture}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.cubin"
    path = user_cache_path("vllm-antkv") / "kernels" / name
    if not path.is_file():
        program = nvrtc.createProgram(text, f"{source}.cu", list(headers.values()), list(headers))
        try:
            nvrtc.compileProgram(program, options)
            code = nvrtc.getCUBIN(program)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"csrc/cuda/{source}.cu: {nvrtc.getProgramLog(program)}") from error
        finally:
            nvrtc.destroyProgram(program)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may compile the same.
        write_whole(path, code)
    return path
