from dataclasses import replace

import pytest

from tests.kernels.cuda_emulation.backend import EmulatedBackend
from tests.unit.evaluate.conftest import *  # noqa: F403  (the tiny model, its codebooks and text)
from vllm_antkv.ops import cuda, dispatch
from vllm_antkv.ops.dispatch import KERNELS


@pytest.fixture
def on_h100(monkeypatch):
    """CUDA's kernels find an H100 with 227 KiB of shared memory. It is only the GPU that is left out here."""
    monkeypatch.setattr(cuda, "_backend", lambda device: EmulatedBackend())
    with_cuda = replace(dispatch.CUDA, missing=lambda device: None)
    monkeypatch.setattr(dispatch, "CUDA", with_cuda)
    monkeypatch.setattr(dispatch, "KERNELS", [with_cuda if each.name == "cuda" else each for each in KERNELS[-3:]])
