"""Prompts that see exactly what the first query of their step does: all kernels give what the reference does."""

from collections.abc import Callable

import torch

from tests.kernels.engine import Engine, Shape
from tests.kernels.triton_cases import serve
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.layer import LayerOperations, LayerState
from vllm_antkv.ops.paged import ReferenceOperations

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def assert_as_reference(
    config: AntKVConfig, shape: Shape, operations: Callable[[LayerState], LayerOperations], schedule: list[list[int]]
) -> None:
    """schedule: new tokens of each request, step by step."""
    config = config.model_copy(update={"prefill_reads_cache": False})
    compute_dtype = torch.promote_types(shape.dtype, torch.float32)
    engines = [
        Engine(config, shape, operations, compute_dtype),
        Engine(config, shape, ReferenceOperations, torch.float64),
    ]
    ours, theirs = (serve(engine, schedule) for engine in engines)
    tolerance = _TOLERANCES[shape.dtype]
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine.output.double(), reference.output.double(), rtol=tolerance, atol=tolerance, msg=str(schedule)
        )
