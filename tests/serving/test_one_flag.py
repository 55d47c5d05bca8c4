"""`vllm serve MODEL --kv-cache-dtype antkv-1bit` and nothing else, for a model that was never calibrated."""

import httpx
import pytest
from transformers import LlamaConfig

from tests.patience import PATIENCE
from tests.serving.server import MODEL_NAME, PRESET, make_odd_model, serving
from vllm_antkv.codebook import Codebook, ModelIdentity

pytestmark = pytest.mark.long

#: Of the context, and so of a calibration window: short, since it is a test.
CONTEXT = 32


def test_a_server_learns_its_codebook(tmp_path, users_cache):
    """That servers that start together learn one is tested in tests/unit/calibrate/test_calibrate_on_start.py."""
    odd_model, log = make_odd_model(tmp_path / "model", CONTEXT), tmp_path / "server.log"
    with serving(odd_model, log, **{"--max-model-len": str(CONTEXT)}) as server:
        body = {"model": MODEL_NAME, "prompt": "The river", "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status().json()
        assert answer["choices"][0]["finish_reason"] == "length"
        status = httpx.get(f"{server.url}/antkv/status", timeout=PATIENCE).json()
    (path,) = users_cache.rglob("*.safetensors")
    codebook = Codebook.load(path, PRESET, ModelIdentity.from_hf_config(LlamaConfig.from_pretrained(odd_model)))
    assert codebook.identity in str(status)
    said = log.read_text()
    assert f"Calibration: {PRESET} is learned." in said
    assert str(path) in said
    # vLLM says so of a package of this name that is not OpenAI's.
    assert "Failed to import Triton kernels" not in said
