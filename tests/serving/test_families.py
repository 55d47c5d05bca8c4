"""Every tested family serves in real vLLM what the offline evaluator computes, and what `auto` does where all is exact.

Random tiny models; what cannot be served is in test_refusals.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.serving import documented
from tests.serving.conftest import Completion, Engine, assert_all_same
from tests.serving.tiny import FAMILY, KIND, WITH_IMAGES, config_of, make_codebook, make_model
from vllm_antkv.codebook import KeyTurn, ModelIdentity, SinkRule
from vllm_antkv.config import AntKVConfig
from vllm_antkv.doctor.verify import EXACT, LENGTHS, MAX_MODEL_LEN, STEP_TOKENS, TOLERANCE
from vllm_antkv.errors import CodebookError, UnsupportedModelError
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.families import FAMILIES
from vllm_antkv.laboratory.base import MethodRequest
from vllm_antkv.offline.attention import quantised_past

pytestmark = pytest.mark.serving

Start = Callable[..., Any]
PROMPTS = [[0, *range(3 + i, 2 + i + length)] for i, length in enumerate(LENGTHS)]
OPTIONS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": STEP_TOKENS,
}
#: Requests that fit together when they are short, and preempt each other as they grow.
SHORT = [prompt[:60] for prompt in 4 * PROMPTS[1:]]
#: Finds many sinks in random models.
SINKS = SinkRule(layer=0, channels=(3,), threshold=0.05)


def test_every_served_family_is_among_them() -> None:
    with_text_alone = {model_type for model_type, _ in FAMILY.values()}
    assert with_text_alone | {WITH_IMAGES} == {family.model_type for family in FAMILIES.values() if family.served}


def expected_logprobs(model: Path, preset: str, codebooks: Path | None = None) -> list[torch.Tensor]:
    """Log-probabilities after each prompt, from the offline evaluator on the Hugging Face model in float32."""
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(model))
    method = build_method(preset, MethodRequest(str(model), identity, codebooks, AntKVConfig()))
    hf_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode(), quantised_past(hf_model, method, MAX_MODEL_LEN):
        return [hf_model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1) for ids in PROMPTS]


def assert_as_expected(completions: list[Completion], expected: list[torch.Tensor], tolerance: float) -> None:
    """After the prompts."""
    for completion, logprobs in zip(completions, expected, strict=True):
        for token, logprob in completion.top_logprobs[0].items():
            assert logprob == pytest.approx(float(logprobs[token]), abs=tolerance)


@pytest.fixture
def given_back(model_type: str, changes: dict[str, Any]) -> Iterator[None]:
    """What vLLM serves through transformers, it makes a class of its own for good: other tests want it as it was."""
    with torch.device("meta"):
        served = type(AutoModelForCausalLM.from_config(config_of(model_type, changes)).get_decoder())
    bases, attributes = served.__bases__, dict(vars(served))
    yield
    served.__bases__ = bases
    for name in vars(served).keys() - attributes.keys():
        delattr(served, name)
    for name, value in attributes.items():
        if vars(served)[name] is not value:
            setattr(served, name, value)


@pytest.mark.usefixtures("given_back")
@pytest.mark.parametrize(("model_type", "changes"), FAMILY.values(), ids=FAMILY.keys())
def test_family(start_engine: Start, tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    preset, learned, random = "antkv-1bit", tmp_path / "model" / "antkv", tmp_path / "random"
    model = make_model(tmp_path / "model", model_type, changes)
    make_codebook(random, model, preset, SINKS)
    documented.calibrate(model, preset, learned)
    assert 0 < documented.divergence(model, preset, learned) < documented.divergence(model, preset, random)
    # Codes of random centroids are far off: whoever reads other rows is seen.
    settings = {"codebooks": str(random)}
    expected = expected_logprobs(model, preset, random)
    # Enough for one long request: layers with and without windows have pages of their own.
    num_blocks = 180 if len(set(getattr(config_of(model_type, changes), "layer_types", None) or ())) > 1 else 80
    options = {**OPTIONS, "num_gpu_blocks_override": num_blocks, "disable_log_stats": False}
    with start_engine(model, preset, settings, **options) as engine:
        batched = engine.complete(PROMPTS, max_tokens=8)
        assert_as_expected(batched, expected, TOLERANCE["float32"])
        alone = engine.complete(PROMPTS, max_tokens=8, together=False)
        assert any(completion.num_cached_tokens for completion in alone)
        assert_all_same(batched, alone)
        growing = engine.complete(SHORT, max_tokens=16, together=False)
        assert _num_preemptions(engine) == 0
        assert_all_same(engine.complete(SHORT, max_tokens=16), growing)
        assert _num_preemptions(engine) > 0
        engine.assert_all_blocks_free()
    with start_engine(model, "auto", **OPTIONS) as engine:
        auto = engine.complete(PROMPTS, max_tokens=8)
    with start_engine(model, preset, EXACT, **OPTIONS) as engine:
        assert_all_same(engine.complete(PROMPTS, max_tokens=8), auto)


def _num_preemptions(engine: Engine) -> int:
    return sum(metric.value for metric in engine.llm.get_metrics() if metric.name == "vllm:num_preemptions")


@pytest.mark.parametrize(("model_type", "changes", "dtype", "preset"), KIND.values(), ids=KIND.keys())
def test_kind(
    start_engine: Start, tmp_path: Path, model_type: str, changes: dict[str, Any], dtype: str, preset: str
) -> None:
    model = make_model(tmp_path / "model", model_type, changes)
    make_codebook(tmp_path / "model" / "antkv", model, preset, SINKS)
    # In 16 bits some rows lie nearer to another centroid than in 32.
    tolerance = 1e-3 if dtype == "float32" else 0.1
    expected = expected_logprobs(model, preset)
    with start_engine(model, preset, dtype=dtype, **OPTIONS) as engine:
        assert_as_expected(engine.complete(PROMPTS, max_tokens=3), expected, tolerance)
        engine.assert_all_blocks_free()


def test_a_layer_that_takes_no_cache_dtype_is_refused(
    start_engine: Start, tmp_path: Path, reads_well: Callable[[BaseException], str]
) -> None:
    model = make_model(tmp_path / "model", "falcon", {"alibi": False, "multi_query": False, "num_kv_heads": 4})
    make_codebook(tmp_path / "model" / "antkv", model, "antkv-1bit")
    with pytest.raises(UnsupportedModelError) as caught, start_engine(model, "antkv-1bit", **OPTIONS):
        pass
    assert "transformer.h.0" in reads_well(caught.value)
    assert "takes no --kv-cache-dtype" in str(caught.value)


def test_a_codebook_that_was_learned_from_keys_turned_otherwise_is_refused(
    start_engine: Start, tmp_path: Path, reads_well: Callable[[BaseException], str]
) -> None:
    model = make_model(tmp_path / "model", "llama", {})
    turns = (KeyTurn(rotary_dim=32), KeyTurn())
    make_codebook(tmp_path / "model" / "antkv", model, "antkv-1bit", turns=turns)
    with pytest.raises(CodebookError) as caught, start_engine(model, "antkv-1bit", **OPTIONS):
        pass
    assert "layer 1 does not turn K, but that of the served model turns 32 channels" in reads_well(caught.value)
