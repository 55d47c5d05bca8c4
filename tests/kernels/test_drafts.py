"""Tokens that are rejected leave no trace: what follows is what it would be if nobody had proposed them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import test_cpu, test_operations
from tests.kernels.engine import Engine, Sequence, Shape, draw_sequence
from tests.kernels.test_cpu_cuts import assert_same_bits, bits
from tests.kernels.test_operations import CONFIGS, SMALL
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.paged import ReferenceOperations

#: Drafts of a step at most.
NUM_DRAFTS = st.sampled_from([1, 3, 5])
#: Tokens of the prompt, and of the answer, which crosses edges of blocks.
LENGTHS = st.tuples(st.integers(1, 300), st.integers(2, 90))


def answer(engine: Engine, sequence: Sequence, num_drafts: int, data: st.DataObject) -> None:
    """Compute what follows the prompt, with drafts."""
    while left := len(sequence.key) - sequence.computed:
        num_new = data.draw(st.integers(1, min(num_drafts + 1, left)))
        # More drafts are rejected around the edges of blocks, where rejecting them takes most back.
        near = VQ_BLOCK_SIZE - sequence.computed % VQ_BLOCK_SIZE <= num_drafts + 1
        sequence.num_rejected = data.draw(st.integers(0, num_new - 1)) if near or data.draw(st.booleans()) else 0
        engine.step([(sequence, num_new)])


def draw_request(shape: Shape, lengths: tuple[int, int]) -> Sequence:
    return replace(draw_sequence(0, sum(lengths), shape), num_prompt_tokens=lengths[0])


def answer_in(engine: Engine, sequence: Sequence, steps: list[tuple[int, int]]) -> None:
    """Compute the prompt, and the whole answer in steps of so many tokens, of which so many are rejected."""
    engine.step([(sequence, sequence.num_prompt_tokens)])
    for num_new, sequence.num_rejected in steps:
        engine.step([(sequence, num_new)])
    assert sequence.computed == len(sequence.key)


def token_by_token(engine: Engine, shape: Shape, lengths: tuple[int, int]) -> Sequence:
    sequence = draw_request(shape, lengths)
    answer_in(engine, sequence, [(1, 0)] * lengths[1])
    return sequence


#: New tokens of a step, and how many of them are rejected: the 128th, several times, with or without its neighbours.
AT_THE_EDGE = [(4, 3), (4, 2), (4, 1), (4, 3), (4, 3), *[(4, 1)] * 13, (3, 0)]
EDGE = (119, 50)


DRAFT_CONFIGS = [
    # Anchors that queries of rejected tokens would change, or a block that closes with them.
    AntKVConfig(anchor_share=0.05),
    AntKVConfig(anchor_share=0.05, recency="none", prefix=0),
    # Rows that are dead if all tokens of a step are accepted.
    AntKVConfig(anchor_share=0.0, recency="sliding:1", sinks=False, prefix=0),
]


@pytest.mark.parametrize("config", DRAFT_CONFIGS, ids=str)
def test_a_block_that_rejected_tokens_filled_closes_again(config):
    expected = token_by_token(Engine(config, SMALL, ReferenceOperations, torch.float64), SMALL, EDGE)
    engine, sequence = Engine(config, SMALL, ReferenceOperations, torch.float64, 3), draw_request(SMALL, EDGE)
    answer_in(engine, sequence, AT_THE_EDGE)
    torch.testing.assert_close(sequence.output, expected.output)


@pytest.mark.long
@settings(max_examples=40)
@given(
    config=CONFIGS,
    prefill_reads_cache=st.booleans(),
    shape=st.sampled_from(test_operations.SHAPES),
    lengths=LENGTHS,
    num_drafts=NUM_DRAFTS,
    data=st.data(),
)
def test_the_reference_gives_what_it_gives_token_by_token(
    config, prefill_reads_cache, shape, lengths, num_drafts, data
):
    config = config.model_copy(update={"prefill_reads_cache": prefill_reads_cache})
    plain = Engine(config, shape, ReferenceOperations, torch.float64)
    drafting = Engine(config, shape, ReferenceOperations, torch.float64, num_drafts)
    one_by_one, sequence = token_by_token(plain, shape, lengths), draw_request(shape, lengths)
    drafting.step([(sequence, lengths[0])])
    answer(drafting, sequence, num_drafts, data)
    torch.testing.assert_close(sequence.output, one_by_one.output, rtol=1e-4, atol=1e-5)
    drafting.finish(sequence)
    assert len(drafting.free) == 1199


@pytest.mark.long
@settings(max_examples=40)
@given(config=CONFIGS, shape=st.sampled_from(test_cpu.SHAPES), lengths=LENGTHS, num_drafts=NUM_DRAFTS, data=st.data())
def test_the_kernels_give_the_same_bits_as_token_by_token(kernels, config, shape, lengths, num_drafts, data):
    shape = replace(shape, dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    plain, drafting = Engine(config, shape, kernels), Engine(config, shape, kernels, num_drafts=num_drafts)
    one_by_one, sequence = token_by_token(plain, shape, lengths), draw_request(shape, lengths)
    beside = replace(draw_sequence(1, 300, shape), num_prompt_tokens=1)
    drafting.step([(sequence, lengths[0]), (beside, 240)])
    answer(drafting, sequence, num_drafts, data)
    assert_same_bits(bits(drafting, sequence), bits(plain, one_by_one))
