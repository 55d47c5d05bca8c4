"""Layers and schedules that the CUDA kernels are tested on, emulated and on a GPU."""

from collections.abc import Callable

import torch

from tests.kernels.engine import Engine, Sequence, Shape, draw_sequence
from tests.kernels.test_drafts import AT_THE_EDGE, EDGE, draw_request
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.layer import LayerOperations, LayerState

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16

#: (layer, bytes of shared memory): all presets and head sizes, groups that fill no mma, smaller GPUs.
LAYERS = [
    (Shape("antkv-1bit", 128, 8, 2, BFLOAT16, error=0.5), 232448),
    (Shape("antkv-2bit", 64, 3, 1, FLOAT16), 232448),
    (Shape("antkv-1bit", 64, 2, 2, FLOAT16, rotary_dim=0), 166912),
    (Shape("antkv-2bit", 128, 9, 1, FLOAT16, magnitude=1.3, reorders=True, error=0.5), 232448),
    (Shape("antkv-0.75bit", 64, 3, 1, FLOAT16, error=0.5), 232448),
    (Shape("antkv-0.75bit", 128, 4, 1, BFLOAT16, magnitude=1.3, reorders=True), 101376),
    (Shape("antkv-0.5bit", 128, 4, 1, BFLOAT16, reorders=True), 232448),
    (Shape("antkv-0.375bit", 128, 2, 1, FLOAT16, rotary_dim=0, reorders=True), 232448),
    (Shape("antkv-0.5bit", 64, 3, 1, FLOAT16, reorders=True), 232448),
    (Shape("antkv-0.25bit", 64, 2, 2, BFLOAT16, reorders=True, error=0.5), 166912),
    (Shape("antkv-0.25bit", 128, 4, 1, FLOAT16, reorders=True), 232448),
    (Shape("antkv-4bit", 128, 4, 1, BFLOAT16, reorders=True, error=0.5), 232448),
    (Shape("antkv-4bit", 64, 3, 1, FLOAT16, magnitude=1.3), 166912),
]

#: Outputs are rounded to the dtype, and codes of float32 may be others than those of float64 where centroids are close.
TOLERANCES = {FLOAT16: 5e-3, BFLOAT16: 4e-2}


def decode_from(engine: Engine, sequences: list[Sequence], prompts: list[int], num_steps: int) -> None:
    """Compute the prompts one by one, then single tokens of all sequences together."""
    for sequence, prompt in zip(sequences, prompts, strict=True):
        if prompt:
            engine.step([(sequence, prompt)])
    for _ in range(num_steps):
        engine.step([(sequence, 1) for sequence in sequences])


def assert_decoded(engine: Engine, sequences: list[Sequence], prompts: list[int], num_steps: int) -> None:
    """The tokens after the prompts attend as the offline evaluator computes in float64."""
    tolerance = TOLERANCES[engine.shape.dtype]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        decoded = slice(prompt, prompt + num_steps)
        expected = engine.offline(sequence)[decoded]
        torch.testing.assert_close(sequence.output[decoded].double(), expected, rtol=tolerance, atol=tolerance)


def assert_decodes(engine: Engine, prompts: list[int], num_steps: int) -> None:
    """Both, for random sequences with these prompts."""
    sequences = [draw_sequence(seed, prompt + num_steps, engine.shape) for seed, prompt in enumerate(prompts)]
    decode_from(engine, sequences, prompts, num_steps)
    assert_decoded(engine, sequences, prompts, num_steps)


def assert_drafts_are_as_single_tokens(shape: Shape, build: Callable[[LayerState], LayerOperations]) -> None:
    """At the edge of a block and of a split of 256: not all queries of a step have as many splits."""
    lengths, outputs = (EDGE[0] + 128, EDGE[1]), []
    for steps in (AT_THE_EDGE, [(1, 0)] * EDGE[1]):
        engine = Engine(AntKVConfig(anchor_share=0.05), shape, build, num_drafts=3)
        other, sequence = draw_sequence(1, 120 + len(steps), shape), draw_request(shape, lengths)
        engine.step([(other, 120), (sequence, lengths[0])])
        for num_new, sequence.num_rejected in steps:
            engine.step([(other, 1), (sequence, num_new)])
        assert_decoded(engine, [sequence], [lengths[0]], lengths[1])
        assert_decoded(engine, [other], [120], len(steps))
        outputs.append(sequence.output[lengths[0] :])
    assert torch.equal(*outputs)
