"""Whatever orders the threads of the CUDA kernels is needed, and the checks of the emulation notice when it is missing.

Each call that does is left out, or put wrong, in turn: the kernel must then give wrong results, not come to its end, or
have a race.
"""

from collections.abc import Callable

import pytest
import torch

from tests.kernels.cuda_emulation.backend import EmulatedBackend, decoding, library, needs_emulation, operations
from tests.kernels.cuda_emulation.cases import LAYERS, TOLERANCES
from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.forked import forked
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.cuda_build import Build
from vllm_antkv.ops.paged import ReferenceOperations

pytestmark = [needs_emulation, pytest.mark.long]
#: Tables in shared memory, and in L2.
SHAPES = [LAYERS[0][0], LAYERS[4][0]]
#: More spans of 256 tokens together than the ring has room for.
PROMPTS = [300, 1, 380, 300]


class OneWorker(EmulatedBackend):
    """Has one CTA per head, which brings all spans through one ring."""

    multiprocessors = 1


def unnoticed(build: Build, check: Callable[[], None]) -> list[str]:
    """Changes at the places that `check` comes by, after which `check` still passes."""
    kernels = library(build)
    kernels.emulation_change(b"", False)
    check()
    names = kernels.emulation_sites().decode().split("\n")[:-1]
    assert names
    found = []
    for name in names:
        site = name.rstrip("*")
        for wrong in (False, True) if name.endswith("*") else (False,):

            def changed(site: bytes = site.encode(), wrong: bool = wrong) -> None:
                kernels.emulation_change(site, wrong)
                check()

            if forked(changed) == 0:
                found.append(f"{site} {'put wrong' if wrong else 'left out'}")
    return found


def decoded_as_expected(engine: Engine) -> Callable[[], None]:
    """A check of the next token of requests after `PROMPTS`, all together."""
    shape = engine.shape
    sequences = [draw_sequence(seed, prompt + 4, shape) for seed, prompt in enumerate(PROMPTS)]
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        engine.step([(sequence, prompt)])
    expected = [engine.offline(sequence) for sequence in sequences]
    tolerance = TOLERANCES[shape.dtype]

    def check() -> None:
        engine.step([(sequence, 1) for sequence in sequences])
        for sequence, rows in zip(sequences, expected, strict=True):
            last = sequence.computed - 1
            torch.testing.assert_close(sequence.output[last].double(), rows[last], rtol=tolerance, atol=tolerance)

    return check


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoding_needs_all_that_orders_its_threads(shape: Shape):
    engine = Engine(AntKVConfig(), shape, decoding(OneWorker()))
    assert unnoticed(Build.of(engine.state.kind, 232448, (9, 0)), decoded_as_expected(engine)) == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_encoding_needs_all_that_orders_its_threads(shape: Shape):
    ours, reference = (Engine(AntKVConfig(), shape, build) for build in (operations(OneWorker()), ReferenceOperations))
    sequence = draw_sequence(0, 200, shape)

    def codes(engine: Engine) -> torch.Tensor:
        sequence.computed, sequence.vq_blocks, sequence.pages, sequence.table = 0, [], [], []
        engine.step([(sequence, 40)])
        return engine.state.vq.k_codes[sequence.vq_blocks[0], :, :40].clone()

    expected = codes(reference)
    check = lambda: torch.testing.assert_close(codes(ours), expected, rtol=0, atol=0)  # noqa: E731
    assert unnoticed(Build.of(ours.state.kind, 232448, (9, 0)), check) == []
