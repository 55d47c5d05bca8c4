"""What a layer costs the host, measured without a GPU: launches are counted where NVIDIA's driver would be called."""

import json
import shutil

import pytest
import torch

from tests.processes import run_python

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the driver's stand-in needs gcc"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="vLLM's build for CUDA has the operators replaced here"),
]


def test_a_prompt_is_measured_beside_vllm_s_own_backend(tmp_path):
    """FlashAttention's backend stores and attends, in a launch each. Ours has encode_store, anchor_score, and a
    call of FlashAttention in two.
    """
    report = tmp_path / "report.json"
    options = ["--steps", "prompt-1024", "--kv-heads", "1", "--rounds", "1", "--json", str(report)]
    said = run_python("-m", "benchmarks.host_cost", *options)
    measured = json.loads(report.read_text())
    (ours,), (theirs,) = measured["rows"], measured["flash_attention"]
    assert (ours["step"], ours["kv_heads"]) == (theirs["step"], theirs["kv_heads"]) == ("prompt-1024", 1)
    assert (ours["launches_per_layer"], theirs["launches_per_layer"]) == (4, 2)
    assert min(side[key] for side in (ours, theirs) for key in ("host_us_per_layer", "plan_ms")) > 0
    assert "| prompt-1024 | 1 | 4 | 2 |" in said


@pytest.mark.parametrize(("module", "says"), [("house.planned_layer", "launches"), ("kernels.launches", "variants")])
def test_a_layer_only_launches_and_short_launches_hand_over_what_triton_does(module, says):
    """What a step is was planned before, and pages were bound when vLLM gave them; the same compiled kernels, with the
    same arguments. Each in a process of its own."""
    assert says in run_python("-m", f"tests.{module}")
