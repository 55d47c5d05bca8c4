"""Every CUDA kernel compiles without a GPU and fits shared memory; 4 query heads to a KV head spill nothing."""

from dataclasses import replace

import pytest

from scripts.compile_cuda import nvcc, spills
from vllm_antkv.ops.cuda_build import Build

pytestmark = pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")

#: Bytes of shared memory that a CTA may have, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
#: The presets at head size 128 with 4 query heads to a KV head, in bfloat16.
DEFAULTS = {
    "antkv-2bit": Build(128, 4, 4, 256, bfloat16=True, bulk=True),
    "antkv-1bit": Build(128, 4, 8, 256, bfloat16=True, bulk=True),
    "antkv-0.75bit": Build(128, 4, 16, 4096, bfloat16=True, bulk=True),
    "antkv-0.5bit": Build(128, 4, 16, 256, bfloat16=True, bulk=True),
    "antkv-0.375bit": Build(128, 4, 32, 4096, bfloat16=True, bulk=True),
}


@pytest.mark.parametrize(("preset", "architecture"), [*((preset, 90) for preset in DEFAULTS), ("antkv-1bit", 80)])
def test_default_builds_fit_and_spill_nothing(preset: str, architecture: int) -> None:
    limit = SHARED_BYTES[architecture]
    build = replace(DEFAULTS[preset], bulk=architecture >= 90).fitted(limit)
    assert build.encode_shared_bytes <= limit
    assert build.decode_shared_bytes <= limit
    spilled = spills("encode_store", build.of_coding(), architecture) | spills("decode", build, architecture)
    assert {"decode", "merge", "encode_store"} <= set(spilled)
    assert not any(spilled.values()), spilled
