"""Every Triton kernel compiles without a GPU and fits shared memory; none but `prefill` spills."""

import json

import pytest

from tests.kernels.triton_versions import NEWEST, OLDEST
from tests.processes import run_python

#: Bytes of shared memory that a program may have, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
KERNELS = (
    "encode_store",
    "anchor_score",
    "close_blocks",
    "prefill",
    "decode",
    "merge",
    "dequantised_pages",
    "merge_calls",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("triton", "preset", "kernels", "architectures", "more"),
    [
        (NEWEST, "antkv-1bit", KERNELS, [80, 100], ()),
        # Codes of 12 bits are read and written in another way.
        (NEWEST, "antkv-0.75bit", ("encode_store", "decode"), [90], ()),
        # Whatever reads positions: what the interpreter runs the compiler may refuse.
        (NEWEST, "antkv-1bit", (*KERNELS[:2], "decode", "dequantised_pages"), [90], ("--three-part",)),
        (NEWEST, "antkv-1bit", ("anchor_score", "decode", "merge"), [90], ("--drafts", "3")),
        (OLDEST, "antkv-1bit", KERNELS, [90], ("--jensen",)),
    ],
    ids=["newest, 8-bit codes", "12-bit codes", "three positions", "drafts", "oldest, 8-bit codes"],
)
def test_kernels_compile_and_fit(triton, preset, kernels, architectures, more):
    options = ["--preset", preset, *more, "--arch", *map(str, architectures), "--kernel", *kernels]
    found = json.loads(run_python("-m", "scripts.compile_triton", *options, environment=triton.environment()))
    if triton is OLDEST:
        assert found["triton"] == triton.name
    for architecture in architectures:
        compiled = found["kernels"][str(architecture)]
        assert set(compiled) == set(kernels)
        for name, kernel in compiled.items():
            assert kernel["shared"] <= SHARED_BYTES[architecture], (architecture, name)
            assert kernel["stack"] == 0 or name == "prefill", (architecture, name)
