"""Every CUDA kernel compiles without a GPU and fits shared memory; 4 query heads to a KV head spill nothing."""

from dataclasses import replace

import pytest

from scripts.compile_cuda import nvcc, spills
from vllm_antkv.ops.cuda_build import Build

pytestmark = [pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed"), pytest.mark.long]

#: Bytes of shared memory that a CTA may have, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
#: The presets at head size 128 with 4 query heads to a KV head, in bfloat16.
DEFAULTS = {
    "antkv-2bit": Build(128, 4, 4, 256, bfloat16=True, bulk=True),
    "antkv-1bit": Build(128, 4, 8, 256, bfloat16=True, bulk=True),
    "antkv-0.75bit": Build(128, 4, 16, 4096, bfloat16=True, bulk=True),
    "antkv-0.5bit": Build(128, 4, 16, 256, bfloat16=True, bulk=True),
    "antkv-0.375bit": Build(128, 4, 32, 4096, bfloat16=True, bulk=True),
    "antkv-0.25bit": Build(64, 3, 32, 256, bfloat16=True, bulk=True),
}
#: Bytes that a default build spills after all: a look-up in L2 that waits in registers.
SPILLED = {("antkv-0.75bit", 80): {"decode": 8}}
#: Groups that fill no mma, and a head size that halves the lanes' work.
OTHER = Build(64, 7, 32, 4096, bfloat16=False, bulk=True)


def kernels(build: Build, architecture: int) -> dict[str, int]:
    """Compiles both sources; what each kernel spills."""
    limit = SHARED_BYTES[architecture]
    fitted = replace(build, bulk=architecture >= 90).fitted(limit)
    found = spills("encode_store", fitted.of_coding(), architecture)
    assert fitted.encode_shared_bytes <= limit
    assert fitted.decode_shared_bytes <= limit
    return found | spills("decode", fitted, architecture)


@pytest.mark.parametrize("architecture", SHARED_BYTES)
@pytest.mark.parametrize("preset", DEFAULTS)
def test_default_builds_fit_and_spill_nothing(preset: str, architecture: int) -> None:
    found = kernels(DEFAULTS[preset], architecture)
    assert {"decode", "merge", "encode_store"} <= set(found)
    allowed = SPILLED.get((preset, architecture), {})
    assert {kernel: n for kernel, n in found.items() if n > allowed.get(kernel, 0)} == {}


def test_another_build_fits() -> None:
    assert kernels(OTHER, 90)
