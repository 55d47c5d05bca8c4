"""What a prompt gives is the same to the last bit, however vLLM cuts it into steps and whoever is served beside it."""

import pytest

from tests.serving.conftest import EMBEDDED, Completion

pytestmark = pytest.mark.serving

PRESET = "antkv-1bit"


def assert_same_bits(ours: list[Completion], expected: list[Completion]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.top_logprobs == theirs.top_logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_equal_however_prompts_are_cut(start_engine, codebooks, prompts, dtype):
    settings = {"codebooks": codebooks}
    if dtype == "bfloat16":
        # Many processors multiply it slowly. These surround the edges of blocks.
        prompts = prompts[::2]
    with start_engine(
        EMBEDDED, PRESET, settings, dtype=dtype, max_num_batched_tokens=1024, enable_prefix_caching=False
    ) as engine:
        alone = engine.complete(prompts, together=False)
        assert_same_bits(engine.complete(prompts), alone)
    for chunk in (67, 256):
        with start_engine(EMBEDDED, PRESET, settings, dtype=dtype, max_num_batched_tokens=chunk) as engine:
            assert_same_bits(engine.complete(prompts), alone)
            assert_same_bits(engine.complete(prompts), alone)
