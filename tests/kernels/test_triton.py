"""The Triton kernels give what the specification says; they run in Triton's interpreter, in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and vLLM, which other tests import, must not see it set.
"""

from pathlib import Path

import pytest

from tests.kernels.triton_versions import NEWEST, OLDEST
from tests.processes import run_pytest

CASES = Path(__file__).with_name("test_triton_interpreted.py")


@pytest.mark.long
@pytest.mark.parametrize(
    ("triton", "chosen"),
    [(NEWEST, ""), (OLDEST, "pages_are_those_of_the_reference or padding or splits")],
    ids=["newest", "oldest"],
)
def test_kernels_in_the_interpreter(triton, chosen):
    environment = triton.environment() | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run_pytest("-k", chosen, CASES, environment=environment)
