"""Every tested family serves in real vLLM what the offline evaluator computes, and what `auto` does where all is exact.

Random tiny models; what cannot be served is in test_refusals.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serving.served_family import (
    OPTIONS,
    PROMPTS,
    SINKS,
    assert_as_expected,
    assert_scheduling_changes_nothing,
    assert_served,
    expected_logprobs,
)
from tests.serving.tiny import FAMILY, KIND, config_of, make_coded, make_model
from tests.serving.tiny_images import WITH_IMAGES
from vllm_antkv.codebook import RopeLayout
from vllm_antkv.errors import CodebookError, UnsupportedModelError
from vllm_antkv.families import FAMILIES
from vllm_antkv.layer_windows import has_mamba2, layer_windows

#: A model of each division of the pool: windows or none, layers that share pages, states of every kind.
ONE_OF_EACH_POOL = (
    "llama",
    "mistral with windows",
    "gpt-oss",
    "gemma3n",
    "lfm2",
    "lfm2 with large states",
    "granite hybrid",
    "qwen3 next",
)


@pytest.mark.long
def test_every_served_family_is_among_them():
    tested = {model_type for model_type, _ in FAMILY.values()} | WITH_IMAGES.keys()
    assert tested == {family.model_type for family in FAMILIES.values() if family.served}


@pytest.fixture
def given_back(model_type, changes) -> Iterator[None]:
    """What vLLM serves through transformers, it makes a class of its own for good: other tests want it as it was.

    And it traces such models up to the limit of recursion, where nothing that is collected can be finalised.
    """
    gc.disable()
    with torch.device("meta"):
        served = type(AutoModelForCausalLM.from_config(config_of(model_type, changes)).get_decoder())
    bases, attributes = served.__bases__, dict(vars(served))
    yield
    gc.enable()
    served.__bases__ = bases
    for name in vars(served).keys() - attributes.keys():
        delattr(served, name)
    for name, value in attributes.items():
        if vars(served)[name] is not value:
            setattr(served, name, value)


def served_with(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Options of every engine."""
    dtype = "bfloat16" if "linear_key_head_dim" in changes else "float32"
    without_hits = {"enable_prefix_caching": False} if has_mamba2(config_of(model_type, changes)) else {}
    return {"dtype": dtype, **without_hits}


@pytest.mark.long
@pytest.mark.usefixtures("given_back")
@pytest.mark.parametrize(("model_type", "changes"), FAMILY.values(), ids=FAMILY.keys())
def test_family(start_engine, tmp_path, model_type, changes) -> None:
    model = make_model(tmp_path / "model", model_type, changes)
    assert_served(start_engine, model, **served_with(model_type, changes))


@pytest.mark.parametrize("name", ONE_OF_EACH_POOL)
def test_scheduling_changes_nothing(start_engine, tmp_path, name):
    model_type, changes = FAMILY[name]
    model = make_model(tmp_path / "model", model_type, changes)
    # Layers with and without windows have pages of their own.
    of_two_kinds = len(set(layer_windows(config_of(model_type, changes)))) > 1
    num_blocks = 180 if of_two_kinds else 80
    assert_scheduling_changes_nothing(start_engine, model, num_blocks, **served_with(model_type, changes))


def test_layers_of_jamba_that_attend(start_engine, tmp_path):
    """CPUs cannot run its other layers."""
    changes = {"attn_layer_period": 1, "attn_layer_offset": 0, "num_experts": 4, "use_mamba_kernels": False}
    assert_served(start_engine, make_model(tmp_path / "model", "jamba", changes))


@pytest.mark.long
@pytest.mark.parametrize(("model_type", "changes", "dtype", "preset"), KIND.values(), ids=KIND.keys())
def test_kind(start_engine, tmp_path, model_type, changes, dtype, preset):
    model = make_coded(tmp_path / "model", model_type, changes, preset, sinks=SINKS)
    # In 16 bits some rows lie nearer to another centroid than in 32.
    tolerance = 1e-3 if dtype == "float32" else 0.1
    expected = expected_logprobs(model, preset)
    with start_engine(model, preset, dtype=dtype, **OPTIONS) as engine:
        assert_as_expected(engine.complete(PROMPTS, max_tokens=3), expected, tolerance)
        engine.assert_all_blocks_free()


def test_a_layer_that_takes_no_cache_dtype_is_refused(start_engine, tmp_path, refused):
    model = make_coded(tmp_path / "model", "falcon", {"alibi": False, "multi_query": False, "num_kv_heads": 4})
    words = ("transformer.h.0", "takes no --kv-cache-dtype")
    with refused(UnsupportedModelError, *words), start_engine(model, "antkv-1bit", **OPTIONS):
        pass


def test_a_codebook_that_was_learned_from_keys_turned_otherwise_is_refused(start_engine, tmp_path, refused):
    model = make_coded(tmp_path / "model", "llama", {}, turns=(RopeLayout(rotary_dim=32), RopeLayout()))
    words = "layer 1 does not rotate K, but that of the served model rotates 32 channels"
    with refused(CodebookError, words), start_engine(model, "antkv-1bit", **OPTIONS):
        pass
