"""Single tokens vote on their block while they attend, and their votes are those that the specification counts."""

import gc
import shutil
import weakref
from dataclasses import replace

import pytest
import torch

from tests.kernels.cuda_emulation.cases import LAYERS
from tests.kernels.engine import Engine, Sequence, Shape, draw_sequence
from tests.kernels.test_cuda import SMALL, operations
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.cuda import CudaOperations
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.select.anchors import EXACT_ANCHOR

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the emulation needs g++ and an x86-64 processor with F16C",
)
#: A prompt, and as many single tokens as close its block and begin another.
PROMPT, END = 120, 134
#: Single tokens, one in either block.
SINKS = (125, 130)


def decoded(config: AntKVConfig, shape: Shape, build, company: int = 0) -> tuple[Engine, Sequence]:
    """Beside a request of chunks of `company` tokens, which is attended to by other kernels."""
    engine, sequence = Engine(config, shape, build), draw_sequence(0, END, shape)
    sequence.is_sink[list(SINKS)] = True
    engine.step([(sequence, PROMPT)])
    other = draw_sequence(1, max(company, 1) * (END - PROMPT), shape)
    for _ in range(PROMPT, END):
        engine.step([(other, company)] * (company > 0) + [(sequence, 1)])
    return engine, sequence


def open_scores(engine: Engine, sequence: Sequence) -> torch.Tensor:
    """Of the block that is not full: (num_kv_heads, 2, tokens)."""
    size = engine.layout.recency_block_size
    columns = [engine.state.recency.scores[sequence.table[at // size], :, :, at % size] for at in range(128, END)]
    return torch.stack(columns, -1)


@pytest.mark.parametrize("shape", [SMALL, LAYERS[0][0]], ids=str)
def test_votes_are_those_of_the_reference(shape):
    config = AntKVConfig(anchor_share=0.05)
    (ours, sequence), (reference, other) = (decoded(config, shape, b) for b in (operations(), ReferenceOperations))
    found, expected = open_scores(ours, sequence), open_scores(reference, other)
    assert expected[..., SINKS[1] - 128].isinf().all()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5)
    chosen, expected = (e.state.vq.anchor_offsets[s.vq_blocks[0]] for e, s in ((ours, sequence), (reference, other)))
    assert torch.equal(chosen, expected)
    # As it is or, beside too many other sinks, corrected.
    assert (chosen % EXACT_ANCHOR == SINKS[0]).any(-1).all()


def test_who_else_is_served_changes_no_vote():
    config = AntKVConfig(anchor_share=0.05)
    alone, beside = (open_scores(*decoded(config, SMALL, operations(), company)) for company in (0, 5))
    assert torch.equal(alone, beside)


def test_votes_of_queries_that_see_codes_of_their_own_block_are_counted_elsewhere():
    config = AntKVConfig(anchor_share=0.05, recency="none")
    (ours, sequence), (reference, other) = (decoded(config, SMALL, b) for b in (operations(), ReferenceOperations))
    assert torch.equal(open_scores(ours, sequence), open_scores(reference, other))


def test_attending_without_scoring_counts_no_votes():
    engine, sequence = decoded(AntKVConfig(), SMALL, operations())
    before = open_scores(engine, sequence)
    engine.operations.anchor_score = lambda *rows: None
    sequence.computed -= 1
    engine.step([(sequence, 1)])
    assert torch.equal(open_scores(engine, sequence), before)


def test_votes_wait_for_their_own_step(monkeypatch: pytest.MonkeyPatch):
    """Another step that is scored in between, with sinks, adds nothing to them."""
    expected = open_scores(*decoded(AntKVConfig(anchor_share=0.05), SMALL, operations()))
    attend = CudaOperations.attend

    def attend_late(self, query, key, value, output, lse, step):
        self.anchor_score(query, key, value, torch.ones(len(query), dtype=torch.bool), lse, replace(step))
        attend(self, query, key, value, output, lse, step)

    monkeypatch.setattr(CudaOperations, "attend", attend_late)
    assert torch.equal(open_scores(*decoded(AntKVConfig(anchor_share=0.05), SMALL, operations())), expected)


def test_a_step_that_never_attends_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    """Its forward pass may have failed: its tensors must go, and nobody may vote in its place."""
    engine, sequence = decoded(AntKVConfig(), SMALL, operations())
    score, steps = engine.operations.anchor_score, []

    def anchor_score(*rows):
        steps.append(weakref.ref(rows[-1]))
        score(*rows)

    monkeypatch.setattr(engine.operations, "anchor_score", anchor_score)
    monkeypatch.setattr(engine.operations, "attend", lambda *rows: None)
    # What kernels are handed of the latest step is kept for its other layers.
    for _ in range(2):
        sequence.computed -= 1
        engine.step([(sequence, 1)])
    gc.collect()
    assert steps[0]() is None
