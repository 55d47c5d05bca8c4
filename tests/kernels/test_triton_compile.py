"""Every Triton kernel compiles without a GPU, and takes no more registers, shared memory and spills than recorded."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton_versions import NEWEST, OLDEST, ROOT

RECORD = Path(__file__).with_name("triton_resources.json")
#: In their default configurations, which is what the record has for every layer.
KERNELS = [
    "encode_store",
    "anchor_score",
    "close_blocks",
    "prefill",
    "decode",
    "merge",
    "plain_pages",
    "merge_attention",
]
ARCHITECTURES = ["80", "90", "100"]


@pytest.mark.parametrize(
    ("triton", "layer", "kernels", "architectures"),
    [
        (NEWEST, "d8c256 h128 g4", KERNELS, ARCHITECTURES),
        # Codes of 12 bits are read and written in another way.
        (NEWEST, "d16c4096 h128 g4", ["encode_store", "decode"], ["90"]),
        # Whatever reads positions: what the interpreter runs the compiler may refuse.
        (NEWEST, "d8c256 h128 g4 mrope", ["encode_store", "anchor_score", "decode", "plain_pages"], ["90"]),
        # That it takes the same source, to machine code no worse: any one architecture shows it.
        (OLDEST, "d8c256 h128 g4", KERNELS, ["90"]),
    ],
    ids=["newest, 8-bit codes", "newest, 12-bit codes", "newest, three positions", "oldest, 8-bit codes"],
)
def test_resources_are_as_recorded(triton, layer, kernels, architectures):
    command = [sys.executable, "-m", "scripts.compile_triton", "--layer", layer, "--check", str(RECORD)]
    command += ["--arch", *architectures, "--kernel", *kernels]
    run = subprocess.run(command, env=triton.environment(), capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert f"{len(kernels) * len(architectures)} kernels agree with" in run.stdout
    if triton is OLDEST:
        assert f"Triton {triton.name}" in run.stdout
