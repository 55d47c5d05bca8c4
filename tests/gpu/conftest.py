"""Real engines and prompts: the fixtures of tests/serving, and what several files need."""

import os
from functools import partial

import pytest

from tests.gpu.completions import MEMORY
from tests.serving.conftest import Start, alone, auto, codebooks, default, engine_environment, prompts, running_engine

__all__ = ["alone", "auto", "codebooks", "default", "engine_environment", "prompts"]

# vLLM reads it when it is imported: it then warns of every call of a step that waits for the device.
os.environ.setdefault("VLLM_GPU_SYNC_CHECK", "warn")


@pytest.fixture(scope="session")
def start_engine(engine_environment) -> Start:
    """As in tests/serving. Engines follow each other in one process, and what one leaves must not stop the next."""
    return partial(running_engine, gpu_memory_utilization=0.5, **MEMORY)
