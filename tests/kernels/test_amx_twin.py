"""The kernels for AMX compute, and store, what they do with plain C++ in the place of tile registers, bit by bit."""

from functools import partial

import pytest
import torch

from tests.kernels.amx.emulated import runs
from tests.kernels.amx.twin import TWIN
from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.test_cpu import BFLOAT16_SHAPES, operations_of, run_schedule
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops import cpu
from vllm_antkv.ops.cpu import CpuOperations

pytestmark = pytest.mark.skipif(not runs(), reason="AMX, or its emulator, needs g++ and AVX512-BF16")

SETTINGS = [AntKVConfig(prefix=3), AntKVConfig(prefill_reads_cache=False)]


@pytest.mark.parametrize("config", SETTINGS, ids=lambda config: f"reads_cache={config.prefill_reads_cache}")
@pytest.mark.parametrize("shape", BFLOAT16_SHAPES[::3], ids=str)
def test_every_bit_is_that_of_plain_tiles(shape: Shape, config: AntKVConfig):
    results = []
    for operations in (operations_of(cpu.VARIANTS[0]), partial(CpuOperations, variant=TWIN)):
        engine = Engine(config, shape, operations)
        sequences = [draw_sequence(seed, length, shape) for seed, length in enumerate((390, 129, 1))]
        run_schedule(engine, sequences, lambda left: min(left - 3, 200) if left > 3 else 1)
        results.append([engine.raw, *(sequence.output.view(torch.uint8) for sequence in sequences)])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
