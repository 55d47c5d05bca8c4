"""What all kernels do with a row in full precision whose recency page is the null block."""

from collections.abc import Callable

import torch

from tests.kernels.engine import Engine, Shape, draw_sequence
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.layer import LayerOperations, LayerState

#: Tokens before those that lack pages, and steps of an answer and of a prompt up to the end of a block.
_LENGTH, _STEPS = 250, (1, 1, 3)


def assert_missing_rows_are_zeros(
    build: Callable[[LayerState], LayerOperations], shape: Shape, recency: str = "sliding:32", reads_cache: bool = True
) -> None:
    """The results are those of pages of zeros, bit for bit; the request is marked, and no other (see `Engine.step`)."""
    outputs = []
    for is_missing in (True, False):
        engine = Engine(AntKVConfig(recency=recency, prefill_reads_cache=reads_cache), shape, build)
        whole, broken = (draw_sequence(seed, 300, shape) for seed in range(2))
        engine.step([(whole, _LENGTH), (broken, _LENGTH)])
        size = engine.layout.recency_block_size
        # One of the prefix, where the layer has it still, and one of the block that is being filled.
        gone = [page for page in (broken.table[0], broken.table[_LENGTH // size - 1]) if page]
        assert gone
        if is_missing:
            broken.table = [0 if page in gone else page for page in broken.table]
        for count in _STEPS:
            if not is_missing:
                for section in vars(engine.state.recency).values():
                    section[gone] = 0
            engine.step([(whole, count), (broken, count)])
        outputs.append(torch.cat([each.output[_LENGTH : broken.computed] for each in (whole, broken)]))
        # A block closes, and its rows are compared with their codes.
        engine.step([(broken, 20), (whole, 1)])
        assert broken.output[: broken.computed].isfinite().all()
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)
