"""The model of a multiprocessor executes the kernels' machine code rightly."""

import ctypes
import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from research import gpu_constants
from research.sm_model.backend import Launch, functions, nvdisasm, parameters, run_first
from research.sm_model.cache import shared_wavefronts
from research.sm_model.constants import Constants, measured
from research.sm_model.decode import Run, Work, run
from research.sm_model.machine import Cta, Machine
from research.sm_model.memory import GlobalMemory, SharedMemory
from research.sm_model.sm import Multiprocessor
from scripts.compile_cuda import SOURCES, nvcc
from vllm_antkv.config import AntKVConfig

PRIMITIVES = Path(__file__).parents[2] / "tests" / "kernels" / "cuda_emulation" / "primitives.cu"
#: Tables in shared memory, read 16 and 8 bytes at a time, and in L2, of 32 and 16 channels.
PRESETS = ("antkv-1bit", "antkv-2bit", "antkv-0.375bit", "antkv-0.75bit")
#: Tokens of two runs.
LENGTHS = (256, 512)
needs_compiler = pytest.mark.skipif(
    nvcc() is None or not nvdisasm().exists(), reason="nvcc or nvdisasm is not installed"
)


@cache
def runs_of(preset: str) -> tuple[Run, Run]:
    """A short and a longer run at default settings."""
    short, long = (run(preset, Work(length), AntKVConfig(), Constants()) for length in LENGTHS)
    return short, long


@needs_compiler
@pytest.mark.parametrize("preset", PRESETS)
def test_machine_code_gives_what_the_specification_says(preset):
    for done in runs_of(preset):
        torch.testing.assert_close(done.output, done.expected, rtol=4e-2, atol=4e-2)
        assert done.report.cycles > sum(done.report.instructions.values()) / 4


@needs_compiler
def test_look_ups_in_shared_memory_wait_for_no_bank():
    """By the addresses of the machine code, on random codes; the tables are read in two lines at least, of K and V."""
    conflicts = runs_of("antkv-1bit")[1].report.conflicts
    found = {line: n for (file, line), n in conflicts.items() if file == "staged_tables.cuh"}
    assert len(found) >= 2
    assert not any(found.values()), found


@needs_compiler
@pytest.mark.parametrize("preset", PRESETS)
def test_queries_that_are_read_together_lie_in_other_banks(preset):
    lines = (SOURCES / "logits.cuh").read_text().splitlines()
    (read,) = (number for number, line in enumerate(lines, 1) if "const uint2 b = " in line)
    assert runs_of(preset)[1].report.conflicts["logits.cuh", read] == 0


@needs_compiler
@pytest.mark.parametrize("preset", PRESETS[:2])
def test_logits_and_weights_that_are_moved_together_lie_in_other_banks(preset):
    conflicts = runs_of(preset)[1].report.conflicts
    for file in ("logits.cuh", "values.cuh"):
        lines = enumerate((SOURCES / file).read_text().splitlines(), 1)
        moves = [number for number, line in lines if re.search(r"\*\)&tile\.(logits|weights)\(", line)]
        assert len(moves) == 2
        assert [conflicts.get((file, number)) for number in moves] == [0, 0]


@needs_compiler
def test_look_ups_in_l2_fetch_nothing_that_is_not_asked_for():
    """Two lanes ask for the halves of a centroid of 32 channels together."""
    report = runs_of("antkv-0.375bit")[1].report
    # Of `load_constant`: a token has 4 centroids of K and 4 of V, in FP8.
    (place,) = (place for place in report.asked if place[0] == "sm_32_intrinsics.hpp")
    assert report.asked[place] == report.fetched[place] > LENGTHS[1] * 8 * 32 * 0.9


@needs_compiler
@pytest.mark.parametrize("latency", [100, 700])
def test_a_producer_brings_pages_through_barriers(latency):
    """96 threads: the third warp copies, two add up."""
    num_pages, page = 7, 512
    numbers = torch.randint(0, 2**20, (num_pages * page,), dtype=torch.int32)
    result = torch.zeros(1, dtype=torch.int32)
    arguments = (ctypes.c_void_p(numbers.data_ptr()), ctypes.c_void_p(result.data_ptr()), ctypes.c_int32(num_pages))
    shared = SharedMemory(3 * page * 4 + 6 * 8 + 64 * 4)
    cta = Cta((0, 0, 0), (1, 1, 1), 96, shared, GlobalMemory(), parameters(arguments))
    machine = Machine(functions(PRIMITIVES, "-arch=sm_90")["stream_pages"])
    constants = Constants(dram_latency=latency)
    streamed = [(numbers.data_ptr(), numbers.data_ptr() + numbers.nbytes)]
    with np.errstate(all="ignore"):
        report = Multiprocessor(machine, cta, constants, streamed).run()
    assert int(result[0]) == int(numbers.sum(dtype=torch.int64)) & 0x7FFFFFFF
    # Three pages are under way at a time.
    assert report.cycles > latency * num_pages / 3


@pytest.mark.parametrize(
    ("addresses", "width", "wavefronts"),
    [
        (np.arange(32) * 4, 4, 1),
        (np.arange(32) * 128, 4, 32),
        (np.zeros(32), 4, 1),
        (np.arange(32) * 8, 8, 2),
        (np.arange(32) * 16, 16, 4),
        (np.arange(32) * 256, 16, 32),
    ],
)
def test_lanes_that_meet_in_a_bank_wait_for_each_other(addresses, width, wavefronts):
    assert shared_wavefronts(addresses.astype(np.uint64), width) == wavefronts


def test_measured_constants_take_the_place_of_assumed_ones(tmp_path):
    file = tmp_path / "constants.json"
    file.write_text(json.dumps({"constants": {"mma_interval": 4.5, "unknown": 1}}))
    assert measured(file) == Constants(mma_interval=4.5)


@needs_compiler
def test_the_benchmark_of_the_constants_finds_those_of_the_model_when_it_runs_there():
    """On a GPU it measures what the model assumes: so it must find, in the model, what the model was given."""
    given = Constants(mma_interval=5, half_interval=1, l1_latency=50, l2_latency=200, dram_latency=600)
    kernels = functions(gpu_constants.SOURCE, "-arch=sm_90")

    def launch(name, blocks, threads, num_shared, more, rounds):
        out = torch.zeros(blocks)
        values = [ctypes.c_void_p(v.data_ptr()) if isinstance(v, torch.Tensor) else v for v in more]
        laid = parameters((ctypes.c_void_p(out.data_ptr()), ctypes.c_int32(rounds), *values))
        launched = Launch((blocks, 1, 1), threads, num_shared, laid)
        tensors = [v for v in more if isinstance(v, torch.Tensor) and v.nbytes > 1 << 20]
        streamed = [(v.data_ptr(), v.data_ptr() + v.nbytes) for v in tensors]
        with np.errstate(all="ignore"):
            run_first(kernels[name], launched, given, streamed)
        return out[:1]

    found = gpu_constants.measure(launch, "cpu", 16, (4 << 10, 1 << 20, 16 << 20), 96)
    assert found == pytest.approx({name: getattr(given, name) for name in found}, rel=0.3)
