"""Real engines and prompts as in tests/serving, and answers of engines whose arithmetic rounds differently."""

import os
from functools import partial
from math import inf

import pytest

from tests.serving.conftest import (
    Completion,
    Start,
    alone,
    auto,
    codebooks,
    default,
    engine_environment,
    prompts,
    running_engine,
)

#: Differences of log-probabilities. float32: orders of summation; between `auto`'s kernels, which multiply in TF32, and
#: ours: that. 16 bits: rounding of rows, probabilities and logits. In bfloat16, logits of 8 to 16 are 1/16 apart; on a
#: CPU, answers to requests alone and in batches differ by up to 0.07 with `auto`, and by 0.09 with antkv-1bit.
SAME_KERNELS, OTHER_KERNELS, FLOAT16, BFLOAT16 = 1e-3, 2e-2, 5e-2, 2e-1
#: More than these tests need, and nothing that has to be filled at start-up.
MEMORY = {"kv_cache_memory_bytes": 1 << 30}
#: Share of all tokens that must be compared before answers part, or the comparison says nothing.
_MIN_COMPARED = 0.8


def assert_close(left: list[Completion], right: list[Completion], tolerance: float) -> None:
    """Same tokens and log-probabilities, request by request, up to where two candidates were as good as equal.

    There the answers may part, and what follows has another past and is not compared.
    """
    compared = sum(_compare(mine, theirs, tolerance) for mine, theirs in zip(left, right, strict=True))
    assert compared >= _MIN_COMPARED * sum(len(completion.tokens) for completion in left)


def _compare(mine: Completion, theirs: Completion, tolerance: float) -> int:
    """Compare one request; the number of tokens compared."""
    assert len(mine.tokens) == len(theirs.tokens)
    for step, (ours, others) in enumerate(zip(mine.top_logprobs, theirs.top_logprobs, strict=True)):
        common = ours.keys() & others.keys()
        assert len(common) >= 3, "candidates may change places only where they are close"
        largest = max(abs(ours[token] - others[token]) for token in common)
        assert largest <= tolerance, f"log-probabilities of token {step} differ by {largest:.1e}"
        chosen, other = mine.tokens[step], theirs.tokens[step]
        if chosen != other:
            assert ours[chosen] - ours.get(other, -inf) <= 2 * tolerance
            return step
    return len(mine.tokens)


__all__ = ["alone", "auto", "codebooks", "default", "engine_environment", "prompts"]

# vLLM reads it when it is imported: it then warns of every call of a step that waits for the device.
os.environ.setdefault("VLLM_GPU_SYNC_CHECK", "warn")


@pytest.fixture(scope="session")
def start_engine(engine_environment) -> Start:
    """As in tests/serving. Engines follow each other in one process, and what one leaves must not stop the next."""
    return partial(running_engine, gpu_memory_utilization=0.5, **MEMORY)
