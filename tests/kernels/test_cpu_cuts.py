"""What the C++ kernels compute for a prompt is the same bit by bit, however it is cut and whoever is beside it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.engine import Engine, Sequence, Shape, draw_sequence
from tests.kernels.test_cpu import SHAPES
from tests.kernels.test_operations import CONFIGS
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.select.anchors import EXACT_ANCHOR

#: Tokens of an answer, which are computed one by one behind the prompt.
ANSWER = 3


def draw_request(seed: int, length: int, shape: Shape, sharpness: float = 1) -> Sequence:
    sequence = draw_sequence(seed, length + ANSWER, shape)
    return replace(sequence, query=sequence.query * sharpness, num_prompt_tokens=length)


def bits(engine: Engine, sequence: Sequence) -> dict[str, torch.Tensor]:
    """Everything that was computed for a request: its outputs, and what is in the pages that it still has."""
    vq, length = engine.state.vq, sequence.computed
    freed = sequence.freed_blocks
    blocks = sequence.vq_blocks[freed:]
    closed = blocks[: length // VQ_BLOCK_SIZE - freed]
    result = {"output": sequence.output[:length].view(torch.uint8)}
    for name in ("k_codes", "v_codes"):
        codes = getattr(vq, name)[blocks].transpose(1, 2).flatten(0, 1)
        result[name] = codes[: length - freed * VQ_BLOCK_SIZE]
    result["offsets"] = vq.anchor_offsets[closed]
    for kind, name in enumerate(("k_anchors", "v_anchors")):
        offsets, rows = result["offsets"][:, :, kind], getattr(vq, name)[closed]
        exact = offsets >= EXACT_ANCHOR
        # A correction takes a byte per channel; what is behind it in a row is nobody's. A row as it is takes two rows.
        result[name] = rows[(offsets >= 0) & ~exact][:, : engine.shape.head_size]
        result[f"{name} as they are"] = rows[exact | exact.roll(1, -1)]
    size = engine.layout.recency_block_size
    first_open = length // VQ_BLOCK_SIZE * VQ_BLOCK_SIZE if engine.config.anchor_rows else length
    open_tokens = range(first_open, length)
    slot = (length - 1) % engine.layout.score_slots
    of_slot = slice(2 * slot, 2 * slot + 2)
    scores = [engine.state.recency.scores[sequence.table[t // size], :, of_slot, t % size] for t in open_tokens]
    result["votes"] = torch.stack(scores).view(torch.uint8) if scores else torch.empty(0)
    return result


def assert_same_bits(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), f"{name}: {(ours[name] != tensor).sum()} of {tensor.numel()} differ"


def preempted(engine: Engine, sequence: Sequence) -> Sequence:
    """The request without anything that was computed for it."""
    engine.finish(sequence)
    output = torch.full_like(sequence.output, torch.nan)
    return replace(sequence, output=output, computed=0, vq_blocks=[], freed_blocks=0, pages=[], table=[])


def resumed(engine: Engine, sequence: Sequence) -> Sequence:
    """The request as another one that finds all that was computed of it in the prefix cache, in other blocks."""

    def copied(blocks: list[int]) -> list[int]:
        copies = [engine.free.pop() if block else 0 for block in blocks]
        engine.raw[copies] = engine.raw[blocks]
        if engine.state.positions is not None:
            engine.state.positions[copies] = engine.state.positions[blocks]
        return copies

    pages, freed = copied(sequence.pages), sequence.freed_blocks
    blocks = [*sequence.vq_blocks[:freed], *copied(sequence.vq_blocks[freed:])]
    resumed = replace(sequence, vq_blocks=blocks, pages=pages, table=list(pages))
    engine.finish(sequence)
    return resumed


@settings(max_examples=60)
@given(config=CONFIGS, shape=st.sampled_from(SHAPES), length=st.integers(1, 390), data=st.data())
def test_a_prompt_is_the_same_bit_by_bit_however_it_is_cut(kernels, config, shape, length, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    shape = replace(shape, dtype=dtype)
    sharpness = data.draw(st.sampled_from([1, 16]))
    engine = Engine(config, shape, kernels)
    alone = draw_request(0, length, shape, sharpness)
    engine.step([(alone, length)])
    for _ in range(ANSWER):
        engine.step([(alone, 1)])
    expected = bits(engine, alone)

    sequence, engine = draw_request(0, length, shape, sharpness), Engine(config, shape, kernels)
    others = [draw_request(seed, 200, shape) for seed in (1, 2)]
    restarts = 0
    while sequence.computed < length + ANSWER:
        left = length - sequence.computed
        cut = data.draw(
            st.sampled_from([1, 2, 7, 40, VQ_BLOCK_SIZE, VQ_BLOCK_SIZE - sequence.computed % VQ_BLOCK_SIZE])
        )
        beside = [(s, n) for s in others if (n := min(data.draw(st.sampled_from([0, 1, 60])), 200 - s.computed))]
        work = [(sequence, min(cut, left) if left > 0 else 1), *beside]
        engine.step(work if data.draw(st.booleans()) else work[::-1])
        if restarts < 2 and 0 < sequence.computed <= length and data.draw(st.integers(0, 3)) == 0:
            restarts += 1
            if sequence.computed % VQ_BLOCK_SIZE == 0:
                sequence = resumed(engine, sequence)
            elif sequence.computed < length:
                sequence = preempted(engine, sequence)
    assert_same_bits(bits(engine, sequence), expected)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_harm_no_request_beside_them(kernels, name, number):
    """A model that overflows for one request has no right to the answers of others."""
    shape = Shape("antkv-1bit", 64, 8, 2, torch.bfloat16, reorders=True)
    results = []
    for change in (1, number):
        engine = Engine(AntKVConfig(), shape, kernels)
        sequence, other = draw_request(0, 300, shape), draw_request(1, 290, shape)
        getattr(other, name)[::7] *= change
        answer = [[(sequence, 1), (other, 1)]] * ANSWER
        for work in ([(sequence, 200), (other, 190)], [(other, 100), (sequence, 100)], *answer):
            engine.step(work)
        results.append(bits(engine, sequence))
    assert_same_bits(*results)
    assert other.output.isnan().any()
