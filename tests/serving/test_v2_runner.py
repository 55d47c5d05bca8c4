"""Model runner V2 and asynchronous scheduling, as GPUs have them: cases of other files in a process of their own.

Its kernels run in Triton's interpreter, ours are those of the CPU.
"""

import os
from pathlib import Path

import pytest

from tests.processes import run_pytest

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("file", "cases", "count"),
    [
        ("test_exactness.py", "(preemption or reused or aborts or log) and not auto", 4),
        ("test_page_store.py", "local_hit_finds or preemption_and_aborts", 2),
    ],
)
def test_scheduling_is_not_seen_there_either(file, cases, count):
    chosen = ["-p", "tests.serving.v2_runner", "-k", cases, Path(__file__).with_name(file)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert f"{count} passed" in run_pytest(*chosen, environment=environment)
