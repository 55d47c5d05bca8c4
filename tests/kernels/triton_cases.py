"""Layers, settings and schedules that the Triton kernels are tested on, in the interpreter and on a GPU."""

from collections.abc import Callable, Collection

import torch
from hypothesis import strategies as st

from tests.kernels.engine import Engine, Sequence, Shape, draw_sequence
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.layer import LayerOperations, LayerState
from vllm_antkv.ops.paged import ReferenceOperations

#: Absolute error of an output whose values are about 1: float32 sums, and probabilities and rows rounded to the dtype.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
#: Block edges from both sides, single tokens, decodes beside prefills, and a block that closes by one token.
SCHEDULE = [(127, 1), (1, 1), (2, 127), (1, 1)]
#: Prompts, then new tokens and how many are rejected: around the edge of a block, beside chunks and single tokens.
#: The last step leaves scores of drafts.
PROMPTS = (123, 3)
DRAFTED = [((4, 2), (30, 0)), ((4, 3), (1, 0)), ((4, 1), (95, 0)), ((4, 3), (3, 1)), ((2, 0), (1, 0)), ((4, 1), (4, 2))]
ONE_HEAD = Shape(num_heads=1, num_kv_heads=1)

SHAPES = [
    Shape("antkv-4bit", 8, 2, 1, error=1.0),
    Shape("antkv-2bit", 48, 1, 1, torch.float16),
    Shape("antkv-1bit", 80, 1, 1, torch.bfloat16, reorders=True),
    Shape("antkv-1bit", 128, 8, 1, torch.bfloat16, error=1.0),
    Shape("antkv-1bit", 16, 3, 1),
    Shape("antkv-1bit", 32, 4, 1, rotary_dim=16, magnitude=1.3, reorders=True, error=1.0),
    Shape("antkv-1bit", 32, 1, 1, neox=False, reorders=True),
    Shape("antkv-1bit", 16, 1, 1, rotary_dim=0),
    Shape("antkv-0.75bit", 80, 1, 1, rotary_dim=48, reorders=True, error=1.0),
    Shape("antkv-0.5bit", 48, 2, 1, reorders=True),
    Shape("antkv-0.375bit", 32, 1, 1),
    Shape("antkv-0.25bit", 64, 2, 1, reorders=True),
    Shape("antkv-1bit", 16, 2, 1, window=100),
    Shape("antkv-1bit", 32, 3, 1, window=40, soft_cap=2.0, has_sinks=True, error=1.0),
    Shape("antkv-1bit", 64, 2, 1, torch.bfloat16, soft_cap=1.0, has_sinks=True),
    Shape("antkv-1bit", 32, 2, 1, rotary_dim=24, three_parts="blocks", reorders=True, magnitude=1.3, error=1.0),
    Shape("antkv-1bit", 16, 1, 1, three_parts="turns", neox=False, window=100),
]
CONFIGS = [
    AntKVConfig(anchor_share=0.05, recency="none", prefix=0),
    AntKVConfig(anchor_share=1.0, sinks=False, recency="none", prefix=0),
    AntKVConfig(anchor_share=0.0, sinks=False, recency="none", prefix=0),
    AntKVConfig(anchor_share=0.0, recency="sliding:4", prefix=1),
    AntKVConfig(anchor_share=0.02, recency="log:4", prefix=3),
    AntKVConfig(prefix=150, recency="sliding:200"),
]
#: For schedules that are drawn, too.
DRAWN_CONFIGS = st.builds(
    AntKVConfig,
    anchor_share=st.sampled_from([0.0, 0.01, 0.05]),
    anchor_dtype=st.sampled_from(["fp8", "model"]),
    sinks=st.booleans(),
    prefix=st.sampled_from([0, 1, 8, 150]),
    recency=st.sampled_from(["none", "sliding:1", "sliding:32", "log:4"]),
)


def serve(engine: Engine, schedule: Collection[Collection[int]] = SCHEDULE) -> list[Sequence]:
    """Sequences, stepped side by side; schedule: new tokens of each, step by step."""
    sequences = [
        draw_sequence(seed, sum(counts), engine.shape) for seed, counts in enumerate(zip(*schedule, strict=True))
    ]
    for counts in schedule:
        engine.step([(sequence, count) for sequence, count in zip(sequences, counts, strict=True) if count])
    return sequences


def serve_drafts(engine: Engine) -> list[Sequence]:
    """Likewise, with `DRAFTED`."""
    accepted = [sum(num_new - rejected for num_new, rejected in steps) for steps in zip(*DRAFTED, strict=True)]
    lengths = [prompt + count for prompt, count in zip(PROMPTS, accepted, strict=True)]
    sequences = [draw_sequence(seed, length + 2, engine.shape) for seed, length in enumerate(lengths)]
    engine.step(list(zip(sequences, PROMPTS, strict=True)))
    for step in DRAFTED:
        for sequence, (_, num_rejected) in zip(sequences, step, strict=True):
            sequence.num_rejected = num_rejected
        engine.step([(sequence, num_new) for sequence, (num_new, _) in zip(sequences, step, strict=True)])
    return sequences


def assert_offline(engine: Engine, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        tolerance = TOLERANCE[engine.shape.dtype]
        ours, expected = (rows[: sequence.computed] for rows in (sequence.output.double(), engine.offline(sequence)))
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=tolerance)


def assert_pages_are_those_of_the_reference(
    operations: Callable[[LayerState], LayerOperations], shape: Shape, num_drafts: int = 0
) -> None:
    """Codes, rows, scores, anchors and counts, after steps around the edge of a block."""
    config = AntKVConfig(anchor_share=0.03, prefix=4)
    engines = [Engine(config, shape, build, num_drafts=num_drafts) for build in (operations, ReferenceOperations)]
    for engine in engines:
        if num_drafts:
            serve_drafts(engine)
        else:
            serve(engine, [(126, 1), (1, 1), (1, 0), (3, 1)])
    ours, theirs = (engine.state for engine in engines)
    for name in ("k_codes", "v_codes", "anchor_offsets"):
        assert torch.equal(getattr(ours.vq, name), getattr(theirs.vq, name)), name
    used = theirs.vq.anchor_offsets[:, :, 0] >= 0
    # Rows that were turned by angles in another order may be rounded to the neighbour.
    assert (ours.vq.k_anchors[used].int() - theirs.vq.k_anchors[used].int()).abs().max() <= 1
    for name in ("k", "v", "scores"):
        pages = [getattr(state.recency, name) for state in (ours, theirs)]
        torch.testing.assert_close(*pages, rtol=1e-4, atol=1e-5, equal_nan=True)
    # As counted where the operations run, which may be a GPU.
    layers = [getattr(engine.operations, "layer", engine.state) for engine in engines]
    counts = [layer.counters.report()["anchors_chosen"] for layer in layers]
    assert counts[0] == counts[1] > 0
