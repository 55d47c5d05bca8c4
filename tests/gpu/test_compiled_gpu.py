"""Compiled and in CUDA graphs, as vLLM serves on GPUs: answers are those of eager steps, and no step waits."""

import os
import warnings
from pathlib import Path

import pytest

import vllm_antkv
from tests.gpu.conftest import FLOAT16, SAME_KERNELS, assert_close
from tests.serving.conftest import EMBEDDED, PRESET

pytestmark = pytest.mark.serving

#: The kernels' launches are in the operations, which lie here.
OURS = Path(vllm_antkv.__file__).parent


def test_same_compiled_and_in_cuda_graphs(start_engine, default, alone, prompts):
    from vllm.config import CUDAGraphMode
    from vllm.utils import gpu_sync_debug

    with start_engine(EMBEDDED, PRESET, default, enforce_eager=False) as engine:
        config = engine.core.model_executor.driver_worker.worker.model_runner.vllm_config
        with warnings.catch_warnings(record=True) as caught:
            assert_close(engine.complete(prompts), alone, SAME_KERNELS)
            assert_close(engine.complete(prompts, together=False), alone, SAME_KERNELS)
    # vLLM takes less, with no more than a warning, where something does not support it.
    is_v2, graphs = config.use_v2_model_runner, config.compilation_config.cudagraph_mode
    assert is_v2 == (os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0")
    assert graphs.decode_mode() == CUDAGraphMode.FULL
    assert gpu_sync_debug._sync_check_enabled, "VLLM_GPU_SYNC_CHECK must be set before vLLM is imported"
    waited = [warning for warning in caught if "sync" in str(warning.message)]
    assert not [str(warning) for warning in waited if Path(warning.filename).is_relative_to(OURS)]


def test_cuda_kernels_answer_as_triton_kernels_do(start_engine, default, prompts):
    """In float16, since the CUDA kernels have no float32; compiled, as they are served."""
    answers = []
    for kernels in ("triton", "cuda"):
        settings = default | {"kernels": kernels}
        with start_engine(EMBEDDED, PRESET, settings, dtype="float16", enforce_eager=False) as engine:
            answers.append(engine.complete(prompts))
    assert_close(*answers, FLOAT16)
