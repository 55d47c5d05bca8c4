"""What of vLLM's wheel and of other wheels is carried to a Hopper GPU, and what stays behind.

vLLM's wheel is 311 MiB, most of it device code for other GPUs and for models that are not served here. What is kept
serves Llama-like models in 16 bits and float32 on compute capability 9.0 (H100, H200), with FlashAttention 3, and with
TurboQuant, which vLLM runs on FlashAttention 2.
"""

import re
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from scripts.gpu.fatbin import Container, Image, machine_code, rewrite
from scripts.gpu.wheels import sha256

ARCHITECTURE = 90
#: Extension modules of vLLM without device code.
_WHOLE = ("vllm/cumem_allocator.abi3.so", "vllm/spinloop.abi3.so", "vllm/fs_io_C.abi3.so")
#: Other files of vLLM by suffix. Everything compiled that is not named in this module stays behind: FlashMLA, DeepGEMM,
#: QuTLASS, FlashKDA, DeepSelect, the front end in Rust.
_SUFFIXES = (".py", ".json", ".jinja", ".typed")
_UNUSED = (
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/third_party/flashmla/",
    "vllm/third_party/tml_fa4/",
    # FlashAttention 4: without its own dependencies it could only fail; absent, vLLM does not choose it.
    "vllm/vllm_flash_attn/cute/",
    "vllm/kernels/helion/configs/",
    # Tuned for mixtures of experts and for quantised matrices.
    "vllm/model_executor/layers/fused_moe/configs/",
    "vllm/model_executor/layers/quantization/utils/configs/",
    "vllm/entrypoints/serve/instrumentator/static/",
)
#: The kernels of FlashAttention 2 that TurboQuant calls on a Llama-3-8B: bfloat16, head size 128. The machine code
#: holds the name of its source file.
_FLASH_ATTENTION_2 = re.compile(rb"_flash_fwd_(?:split_(?:align_)?)?hdim128_bf16(?:_causal)?_sm80_cu_")


class Trimmer:
    """Decides about the files of wheels.

    cache: a folder for machine code that was compiled here.
    """

    def __init__(self, cache: Path) -> None:
        self._modules: dict[str, Callable[[Container], Sequence[Image]]] = {
            "vllm/_C_stable_libtorch.abi3.so": partial(_usable, ptx=True),
            # Its PTX is Marlin, for quantised mixtures of experts.
            "vllm/_moe_C_stable_libtorch.abi3.so": partial(_usable, ptx=False),
            "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": partial(_usable, ptx=True),
            "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": partial(_flash_attention_2, cache=cache),
        }

    def __call__(self, name: str, content: bytes) -> bytes | None:
        """The content of a file to carry, or None."""
        if not name.startswith("vllm/"):
            return content
        if name in self._modules:
            return rewrite(content, self._modules[name])
        if name in _WHOLE or (name.endswith(_SUFFIXES) and not name.startswith(_UNUSED)):
            return content
        return None


def _usable(container: Container, ptx: bool) -> list[Image]:
    """Machine code for the GPU; where there is none, its newest PTX, if `ptx`."""
    code = [image for image in container.images if not image.is_ptx and image.architecture == ARCHITECTURE]
    if code or not ptx:
        return code
    texts = [image for image in container.images if image.is_ptx and image.architecture <= ARCHITECTURE]
    return [max(texts, key=lambda image: image.architecture)] if texts else []


def _flash_attention_2(container: Container, cache: Path) -> Sequence[Image]:
    """Machine code of the kernels that are needed.

    The wheel has machine code for compute capability 8.0, which Hopper cannot run, and PTX, which the driver would
    compile at first use: up to a minute for each source file. That minute is spent here.
    """
    code = next((image for image in container.images if not image.is_ptx), None)
    (text,) = _usable(container, ptx=True) or (None,)
    if code is None or text is None or not _FLASH_ATTENTION_2.search(code.payload):
        return []
    return [machine_code(_compiled(_text(text), cache), ARCHITECTURE, like=code)]


def _text(ptx: Image) -> bytes:
    frame = ptx.zstd
    if frame is not None:
        return _run(["zstd", "-dcq"], frame).rstrip(b"\0")
    return ptx.payload.rstrip(b"\0")


def _compiled(ptx: bytes, cache: Path) -> bytes:
    path = cache / f"{sha256(ptx)}.sm_{ARCHITECTURE}.cubin"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        source, unfinished = path.with_suffix(".ptx"), path.with_suffix(".unfinished")
        source.write_bytes(ptx)
        _run(["ptxas", f"-arch=sm_{ARCHITECTURE}", str(source), "-o", str(unfinished)])
        source.unlink()
        unfinished.rename(path)
    return path.read_bytes()


def _run(command: list[str], data: bytes = b"") -> bytes:
    """Output of a program, which must succeed."""
    try:
        return subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout
    except FileNotFoundError:
        raise SystemExit(
            f"The bundle needs the program '{command[0]}' on this machine: install zstd and CUDA 13.0's ptxas "
            "(it comes with nvcc) and run this again."
        ) from None
