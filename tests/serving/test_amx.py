"""Real vLLM is served by the kernels for AMX, whose instructions are emulated where the processor has none."""

import pytest

from tests.kernels.amx.emulated import amx
from tests.serving.conftest import EMBEDDED
from tests.serving.test_cuts import PRESET, assert_same_bits
from vllm_antkv.ops import cpu

pytestmark = pytest.mark.serving


@pytest.fixture
def amx_is_there(monkeypatch) -> None:
    """For the choice of kernels alone: vLLM and its libraries are not told."""
    missing = cpu.Variant.missing

    def missing_beside_amx(variant: cpu.Variant) -> str | None:
        with amx():
            return missing(variant)

    monkeypatch.setattr(cpu.Variant, "missing", missing_beside_amx)
    if (why := cpu.VARIANTS[0].missing()) is not None:
        pytest.skip(why)


def test_tokens_are_those_of_the_reference_and_no_cut_changes_a_bit(amx_is_there, start_engine, codebooks, prompts):
    some, done = prompts[::5], {}
    for kernels, chunk in (("amx", 1024), ("amx", 67), ("reference", 1024)):
        settings = {"codebooks": codebooks, "kernels": kernels}
        with start_engine(EMBEDDED, PRESET, settings, dtype="bfloat16", max_num_batched_tokens=chunk) as engine:
            done[kernels, chunk] = engine.complete(some)
    ours, cut, reference = done.values()
    assert_same_bits(cut, ours)
    # Rounding to bfloat16 moves log-probabilities of this model by as much.
    assert all(mine.difference(theirs) <= 0.1 for mine, theirs in zip(ours, reference, strict=True))
