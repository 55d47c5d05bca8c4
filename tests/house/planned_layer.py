"""A layer of a prompt runs while whoever plans a step, binds pages or builds kernels would fail.

A process of its own: the stand-in for NVIDIA's driver takes its place for good.
"""

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.host.antkv import AntKV
from benchmarks.host.driver import driver, num_launches
from benchmarks.host.step import Batch, engine_config
from vllm_antkv.ops import varlen_plan
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.vllm_adapter.step.impl import AntKVImpl


def forbidden(*arguments: Any, **options: Any) -> None:
    """What no layer may call."""
    raise AssertionError("a layer plans, binds or builds")


def main() -> None:
    """Raises where it does."""
    driver()
    with tempfile.TemporaryDirectory() as folder:
        side = AntKV(engine_config(Path(folder), 1), 1)
    batch = Batch([1, 300], [500, 700])
    rows = batch.rows(1)
    with torch.inference_mode():
        metadata = side.plan([batch.metadata(size) for size in side.block_sizes])
        assert metadata["layer"].plan.rounds, "prompts are planned with the step"
        with (
            side.context(metadata),
            patch.object(AntKVImpl, "take_pages", forbidden),
            patch.object(LayerState, "of", forbidden),
            patch.object(varlen_plan, "Round", forbidden),
            patch.object(torch.Tensor, "pin_memory", forbidden),
        ):
            side.run(rows, torch.empty_like(rows.query), metadata)
    print(num_launches(), "launches")


if __name__ == "__main__":
    main()
