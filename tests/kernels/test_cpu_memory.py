"""Without memory the C++ kernels end the process with one sentence: no exception may cross their C interface."""

import os
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.forked import forked
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops import cpu
from vllm_antkv.ops.cpu import CpuOperations
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))

#: Of a step, whose list of tokens, or of runs of them, takes more than is left.
NUM_TOKENS = 1 << 30
LEFT_BYTES = 32 << 20


@pytest.mark.parametrize("operation", ["run", "attend"])
def test_a_failing_allocation_ends_the_process_with_one_sentence(operation, tmp_path):
    shape = Shape()
    engine = Engine(AntKVConfig(), shape, partial(CpuOperations, variant=cpu.best()))
    sequence = draw_sequence(0, 1, shape)
    rows = StepRows(sequence.query, sequence.key, sequence.value, None)
    table = torch.zeros(1, 1, dtype=torch.int32)
    step = StepPlan(
        query_start_loc=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        vq_block_table=table,
        recency_block_table=table,
        max_query_len=NUM_TOKENS,
        max_seq_len=NUM_TOKENS,
    )
    compute: Any = getattr(engine.operations, operation)

    def with_little_memory() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + LEFT_BYTES, resource.RLIM_INFINITY))
        compute(rows, sequence.output, step)

    with (tmp_path / "errors").open("w+") as errors:
        status = forked(with_little_memory, errors.fileno())
    assert os.WTERMSIG(status) == signal.SIGABRT
    said = (tmp_path / "errors").read_text()
    assert said.startswith("antkv: no memory for ")
    assert said.count("\n") == 1
