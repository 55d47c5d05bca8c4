"""`vllm serve MODEL --kv-cache-dtype antkv-1bit` and nothing else, for a model that was never calibrated."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from transformers import LlamaConfig

from tests.patience import PATIENCE
from tests.serving.server import PRESET, answer, make_odd_model, serving
from vllm_antkv.codebook import Codebook, ModelIdentity

pytestmark = pytest.mark.serving

#: Of the context, and so of a calibration window: short, since it is a test.
CONTEXT = 128


def test_two_servers_that_start_together_learn_one_codebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    odd_model = make_odd_model(tmp_path / "model", CONTEXT)
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        options = {"--max-model-len": str(CONTEXT)}
        urls = list(pool.map(lambda log: stack.enter_context(serving(odd_model, log, **options)), logs))
        assert [answer(url) for url in urls] == ["length", "length"]
        served = [httpx.get(f"{url}/antkv/status", timeout=PATIENCE).json() for url in urls]
    (path,) = (tmp_path / "cache" / "vllm-antkv").rglob("*.safetensors")
    identity = ModelIdentity.from_hf_config(LlamaConfig.from_pretrained(odd_model))
    codebook = Codebook.load(path, PRESET, identity)
    assert [codebook.identity in str(status) for status in served] == [True, True]
    texts = [log.read_text() for log in logs]
    assert sorted(f"Calibration: {PRESET} is learned." in text for text in texts) == [False, True]
    assert all(str(path) in text for text in texts)
