"""Every CUDA kernel compiles without a GPU and fits shared memory; 4 query heads to a KV head spill nothing."""

from dataclasses import replace
from itertools import product

import pytest

from scripts.compile_cuda import nvcc, spills
from vllm_antkv.ops.cuda_build import Build

pytestmark = [pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed"), pytest.mark.long]

#: Bytes of shared memory that a CTA may have, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
#: Of those that have no room for tables of 256 centroids beside heads of 128 channels.
SMALL_SHARED_BYTES = {86: 99 << 10, 89: 99 << 10, 120: 99 << 10}
#: The presets at head size 128 with 4 query heads to a KV head, in bfloat16.
DEFAULTS = {
    "antkv-4bit": Build(128, 4, 2, 256, bfloat16=True, bulk=True),
    "antkv-2bit": Build(128, 4, 4, 256, bfloat16=True, bulk=True),
    "antkv-1bit": Build(128, 4, 8, 256, bfloat16=True, bulk=True),
    "antkv-0.75bit": Build(128, 4, 16, 4096, bfloat16=True, bulk=True),
    "antkv-0.5bit": Build(128, 4, 16, 256, bfloat16=True, bulk=True),
    "antkv-0.375bit": Build(128, 4, 32, 4096, bfloat16=True, bulk=True),
    "antkv-0.25bit": Build(64, 3, 32, 256, bfloat16=True, bulk=True),
}
#: Bytes that a default build spills after all: a look-up in L2 that waits in registers.
SPILLED = {
    ("antkv-4bit", 100): {"decode": 8},
    ("antkv-0.75bit", 100): {"decode": 24},
    ("antkv-0.375bit", 100): {"decode": 24},
}
#: Pages of 4 bits are too large beside tables for heads of 128 channels in the shared memory of an A100.
CASES = [case for case in product(DEFAULTS, SHARED_BYTES) if case != ("antkv-4bit", 80)]
#: Groups that fill no mma, and a head size that halves the lanes' work.
OTHER = Build(64, 7, 32, 4096, bfloat16=False, bulk=True)


def kernels(build: Build, architecture: int) -> dict[str, int]:
    """Compiles both sources; what each kernel spills."""
    limit = (SHARED_BYTES | SMALL_SHARED_BYTES)[architecture]
    fitted = replace(build, bulk=architecture >= 90).fitted(limit)
    found = spills("encode_store", fitted.of_coding(), architecture)
    assert fitted.encode_shared_bytes <= limit
    assert fitted.decode_shared_bytes <= limit
    return found | spills("decode", fitted, architecture)


@pytest.mark.parametrize(("preset", "architecture"), CASES)
def test_default_builds_fit_and_spill_nothing(preset: str, architecture: int) -> None:
    found = kernels(DEFAULTS[preset], architecture)
    assert {"decode", "encode_store"} <= set(found)
    allowed = SPILLED.get((preset, architecture), {})
    assert {kernel: n for kernel, n in found.items() if n > allowed.get(kernel, 0)} == {}


@pytest.mark.parametrize("architecture", SMALL_SHARED_BYTES)
def test_heads_of_64_channels_fit_where_there_is_little_shared_memory(architecture: int) -> None:
    assert kernels(replace(DEFAULTS["antkv-1bit"], head_size=64), architecture)


@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_small_heads_of_four_bits_fit_and_spill_nothing(architecture: int) -> None:
    assert not any(kernels(Build(64, 4, 2, 256, bfloat16=True, bulk=True), architecture).values())


def test_another_build_fits() -> None:
    assert kernels(OTHER, 90)
