"""Models with quantised weights are served with the codebook of the original."""

from pathlib import Path

import pytest
import torch

from tests.serving.conftest import PRESET, assert_all_same
from tests.serving.quantised import SCHEMES, quantise
from tests.serving.test_families import OPTIONS, PROMPTS, SINKS
from tests.serving.tiny import make_coded
from vllm_antkv.doctor.verify import EXACT, TOLERANCE, largest_difference

#: vLLM's kernels for such weights compute in 16 bits.
IN_16_BITS = {**OPTIONS, "dtype": "bfloat16"}
WITHOUT_AVX512 = not torch.cuda.is_available() and not torch.cpu.get_capabilities().get("avx512_f")


@pytest.fixture
def original(tmp_path) -> Path:
    """An unquantised model with a codebook."""
    return make_coded(tmp_path / "original", "llama", {}, sinks=SINKS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_quantised_and_the_cache_is_the_same(start_engine, original, tmp_path, scheme):
    if scheme == "W4A16" and WITHOUT_AVX512:
        pytest.skip("vLLM's build for CPUs runs 4-bit weights with AVX-512 only, which this processor lacks")
    model = quantise(original, tmp_path / "model", scheme)
    settings = {"codebooks": str(original / "antkv")}
    with start_engine(model, "auto", **IN_16_BITS) as engine:
        auto = engine.complete(PROMPTS, max_tokens=4)
    with start_engine(model, PRESET, settings | EXACT, **IN_16_BITS) as engine:
        exact = engine.complete(PROMPTS, max_tokens=4)
    assert largest_difference(exact, auto) <= TOLERANCE["bfloat16"]
    with start_engine(model, PRESET, settings, **IN_16_BITS) as engine:
        assert_all_same(engine.complete(PROMPTS, max_tokens=4), engine.complete(PROMPTS, max_tokens=4, together=False))


def test_scales_of_an_fp8_cache_are_left_alone(start_engine, original, tmp_path, said):
    plain = quantise(original, tmp_path / "plain", "W8A8")
    scaled = quantise(original, tmp_path / "scaled", "W8A8", kv_scales=True)
    settings = {"codebooks": str(original / "antkv")}
    found, left_alone = [], []
    for model in (plain, scaled):
        said.clear()
        with start_engine(model, PRESET, settings, **IN_16_BITS) as engine:
            found.append(engine.complete(PROMPTS, max_tokens=4))
        left_alone.append(any("Scales for an FP8 KV cache in the checkpoint are not used" in line for line in said))
    assert_all_same(*found)
    assert left_alone == [False, True]
