"""Kernels with stamps give the same bits, and say when their warps came to what; on a GPU, in the model, emulated."""

import shutil
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.antkv_layer import Requests, Tokens
from research import gpu_stamps
from research.sm_model.backend import ModelledBackend, kernels_of, nvdisasm
from research.sm_model.constants import Constants
from research.stamps import PHASES, START_UP, StampedBackend, cycles_of
from scripts.compile_cuda import nvcc
from tests.kernels.cuda_emulation.backend import EmulatedBackend
from tests.kernels.cuda_emulation.cases import WithPrefill
from tests.kernels.engine import Engine, draw_sequence
from tests.kernels.test_cuda import SMALL
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.cuda import CudaOperations
from vllm_antkv.ops.cuda_build import Build
from vllm_antkv.ops.paged import ReferenceOperations

needs_compiler = pytest.mark.skipif(
    nvcc() is None or not nvdisasm().exists(), reason="nvcc or nvdisasm is not installed"
)
needs_emulation = pytest.mark.skipif(
    shutil.which("g++") is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the emulation needs g++ and an x86-64 processor with F16C",
)


@needs_emulation
def test_stamps_change_no_bit_and_have_every_phase():
    outputs, stamps = [], []
    for backend in (EmulatedBackend(), StampedBackend(EmulatedBackend(), "cpu")):
        engine = Engine(
            AntKVConfig(),
            SMALL,
            lambda layer: CudaOperations(layer, backend=backend, triton=WithPrefill(layer)),  # noqa: B023
        )
        engine.operations.encode_store = ReferenceOperations(engine.state).encode_store
        sequence = draw_sequence(0, 300, SMALL)
        engine.step([(sequence, 299)])
        engine.step([(sequence, 1)])
        outputs.append(sequence.output[299])
        stamps.append(getattr(backend, "stamps", None))
    assert torch.equal(*outputs)
    found = stamps[1]
    # One CTA of head 0 has work: a span of 256 tokens, and one of 44, in which two warps attend.
    assert (found[1:] == 0).all()
    *attending, bringing = (row[row != 0] for row in found[0])
    for warp, words in enumerate(attending):
        assert (words >> 8).diff().min() > 0
        names = [PHASES[word - 1] for word in (words & 0xFF).tolist()]
        attended = ["logits of codes", "kept keys", "weights", "kept values", "values of codes"]
        assert names == [
            *START_UP[:3],
            *("wait for a span", *attended),
            *("wait for a span", *(attended if warp < 2 else [])),
            *("merge of warps", "wait for a span", "end"),
        ]
    assert (bringing >> 8).diff().min() > 0
    assert [PHASES[word - 1].removeprefix("bringing: ") for word in (bringing & 0xFF).tolist()] == [
        *("start", "beginning of a split"),
        *("wait for room", "a span") * 2,
        # The end, and round the ring to the slot of the second span.
        *("wait for room",) * 4,
        *("votes", "end"),
    ]
    assert set(cycles_of(found)) == {*START_UP, *PHASES} - {"end"}


def test_cycles_are_means_by_what_was_done():
    """Two warps: the second has no room for more than its first wait."""
    clocks = torch.tensor([[10, 14, 20, 21, 31, 40, 43], [10, 16, 20, 25, 0, 0, 0]])
    phases = torch.tensor([[1, 2, 3, 4, 5, 4, 12], [1, 2, 3, 4, 0, 0, 0]])
    stamps = (clocks << 8 | phases)[None]
    assert cycles_of(stamps) == {
        "start": 5.0,
        "tables": 5.0,
        "angles": 3.0,
        "first span": 10.0,
        "wait for a span": 3.0,
        "logits of codes": 9.0,
    }


@needs_compiler
def test_only_kernels_with_stamps_look_at_the_clock():
    build = Build(128, 4, 8, 256, bfloat16=True, fp8=False, bulk=True)
    looks = [
        sum("SR_CLOCK" in i.text for i in kernels_of(replace(build, stamps=stamps))["antkv_decode"].code)
        for stamps in (False, True)
    ]
    assert looks[0] == 0
    assert looks[1] >= len(PHASES)


@needs_compiler
def test_the_model_predicts_what_stamps_say():
    """A CTA's cycles are those of its phases, one after another."""
    requests = Requests("antkv-1bit", 1, 600, 1, device="cpu")
    inner = ModelledBackend(Constants())
    backend = StampedBackend(inner, "cpu")
    tokens = Tokens.random(1, "cpu")
    operations = CudaOperations(requests.state, backend=backend, triton=WithPrefill(requests.state))
    operations.attend(tokens.rows, tokens.output, requests.step)
    expected = torch.empty_like(tokens.output)
    WithPrefill(requests.state).attend(tokens.rows, expected, requests.step)
    torch.testing.assert_close(tokens.output[0, :4], expected[0, :4], rtol=4e-2, atol=4e-2)
    last = (backend.stamps >> 8).max().item()
    assert 0.95 < last / inner.reports["antkv_decode"].cycles <= 1


def test_measured_cycles_stand_beside_predictions():
    rows = gpu_stamps.rows({"p": {"start": 1310.0, "votes": 5.0}}, {"p": {"start": 1412.0}})
    lines = gpu_stamps.stamps_table({"rows": rows}).splitlines()
    assert lines[2:] == ["| p | start, once | 1,310 | 1,412 |", "| p | votes | 5 |  |"]
