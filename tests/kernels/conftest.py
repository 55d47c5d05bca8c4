"""The C++ kernels that this processor has, for every file that tests them."""

from functools import partial

import pytest

from vllm_antkv.ops import cpu
from vllm_antkv.ops.cpu import CpuOperations

#: Plain tiles run on every machine all that AMX runs, but for its instructions: test_tiles.py. The variant that serves
#: on this processor is tested by `make test`.
TESTED = [
    pytest.param(variant, id=variant.name, marks=[] if variant == cpu.best() else pytest.mark.long)
    for variant in (*cpu.VARIANTS, cpu.PLAIN_TILES)
]
#: Each of the libraries.
BUILDS = {variant.library: variant for variant in cpu.VARIANTS}.values()


def operations_of(variant: cpu.Variant) -> partial[CpuOperations]:
    missing = variant.missing()
    assert "are wrong" not in (missing or "")
    if missing is not None:
        pytest.skip(missing)
    return partial(CpuOperations, variant=variant)


@pytest.fixture(scope="module", params=TESTED)
def kernels(request):
    """CpuOperations of each variant that this processor has."""
    return operations_of(request.param)


@pytest.fixture(scope="module", params=BUILDS, ids=lambda variant: variant.name)
def float32_kernels(request):
    """The same for float32 alone, to which tiles make no difference."""
    return operations_of(request.param)
