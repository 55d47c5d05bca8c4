"""The CUDA kernels on a GPU, through CuPy, give what the offline evaluator computes in float64."""

import pytest

from tests.gpu.on_device import DEVICE, OnDevice
from tests.kernels.cuda_emulation.cases import LAYERS, assert_decodes, assert_drafts_are_as_single_tokens
from tests.kernels.engine import Engine
from tests.kernels.missing_rows import assert_missing_rows_are_zeros
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops import cuda, cuda_backend
from vllm_antkv.ops.cuda import CudaOperations
from vllm_antkv.ops.cuda_build import Build
from vllm_antkv.ops.paged import ReferenceOperations

CONFIGS = [
    AntKVConfig(),
    AntKVConfig(anchor_share=0.0, sinks=False, recency="none", prefix=0),
    AntKVConfig(anchor_share=1.0, recency="log:42", prefix=150),
]


@pytest.fixture(autouse=True)
def kernels_can_run():
    if (reason := cuda.missing(DEVICE)) is not None:
        pytest.skip(reason)


def on_device(layer):
    return OnDevice(layer, lambda moved: CudaOperations(moved, triton=ReferenceOperations(moved)))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", [shape for shape, _ in LAYERS], ids=str)
def test_decoding_gives_what_the_evaluator_computes(monkeypatch, config, shape):
    monkeypatch.setattr(cuda, "SPLIT", 256)
    assert_decodes(Engine(config, shape, on_device), [0, 1, 126, 255, 330, *[3] * 33], 4)


@pytest.mark.parametrize("shape", [shape for shape, _ in LAYERS], ids=str)
def test_drafts_get_the_bits_of_single_tokens(monkeypatch, shape):
    monkeypatch.setattr(cuda, "SPLIT", 256)
    assert_drafts_are_as_single_tokens(shape, on_device)


@pytest.mark.parametrize("recency", ["sliding:32", "none"])
@pytest.mark.parametrize("shape", [shape for shape, _ in LAYERS], ids=str)
def test_a_row_whose_page_is_null_is_zeros_and_marks_its_request(shape, recency):
    assert_missing_rows_are_zeros(on_device, shape, recency)


def test_machine_code_is_compiled_once_for_a_source_and_an_architecture(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_backend, "user_cache_path", lambda name: tmp_path)
    layer = Build(64, 3, 4, 256, bfloat16=False, bulk=True)
    first = cuda_backend.cubin("encode_store", layer, "sm_90")
    written = first.stat().st_mtime_ns
    assert cuda_backend.cubin("encode_store", layer, "sm_90") == first
    assert first.stat().st_mtime_ns == written
    assert cuda_backend.cubin("encode_store", layer, "sm_80") != first
    assert cuda_backend.cubin("encode_store", Build(64, 3, 8, 256, bfloat16=False, bulk=True), "sm_90") != first
