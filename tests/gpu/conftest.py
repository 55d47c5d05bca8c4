"""Real engines and prompts: the fixtures of tests/serving, and what several files need."""

import os
from functools import partial
from typing import Any

import pytest

from tests.gpu.completions import MEMORY, PRESET, Start
from tests.serving.conftest import EMBEDDED, Completion, codebooks, engine_environment, prompts, running_engine

__all__ = ["codebooks", "engine_environment", "prompts"]

# vLLM reads it when it is imported: it then warns of every call of a step that waits for the device.
os.environ.setdefault("VLLM_GPU_SYNC_CHECK", "warn")


@pytest.fixture(scope="session")
def start_engine(engine_environment: None) -> Start:
    """As in tests/serving. Engines follow each other in one process, and what one leaves must not stop the next."""
    return partial(running_engine, gpu_memory_utilization=0.5, **MEMORY)


@pytest.fixture(scope="module")
def default(codebooks: str) -> dict[str, Any]:
    """Default settings, with sinks to be found."""
    return {"codebooks": codebooks}


@pytest.fixture(scope="module")
def alone(start_engine: Start, default: dict[str, Any], prompts: list[list[int]]) -> list[Completion]:
    """Default settings, one request at a time, whole prompts, nothing shared."""
    with start_engine(EMBEDDED, PRESET, default, enable_prefix_caching=False) as engine:
        return engine.complete(prompts, together=False)
