"""Single tokens vote on their block while they attend, and their votes are those that the specification counts."""

import pytest
import torch

from tests.kernels.cuda_emulation.backend import needs_emulation, operations
from tests.kernels.cuda_emulation.cases import LAYERS
from tests.kernels.engine import Engine, Sequence, Shape, draw_sequence
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.select.anchors import EXACT_ANCHOR

pytestmark = needs_emulation
SMALL = LAYERS[1][0]
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


def test_attending_to_the_cache_of_another_layer_counts_no_votes():
    engine, sequence = decoded(AntKVConfig(), SMALL, operations())
    before = open_scores(engine, sequence)
    engine.operations.run = engine.operations.attend
    sequence.computed -= 1
    engine.step([(sequence, 1)])
    assert torch.equal(open_scores(engine, sequence), before)
