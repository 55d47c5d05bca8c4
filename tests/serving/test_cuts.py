"""What a prompt gives is the same to the last bit, however vLLM cuts it into steps and whoever is served beside it."""

import pytest
import torch

from tests.serving.conftest import EMBEDDED, PRESET, Completion

pytestmark = pytest.mark.long


def assert_same_bits(ours: list[Completion], expected: list[Completion]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.top_logprobs == theirs.top_logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_equal_however_prompts_are_cut(start_engine, codebooks, prompts, dtype):
    if dtype == "bfloat16":
        if torch.cpu._is_amx_tile_supported():
            pytest.skip("with AMX oneDNN's products of bfloat16 round by how many rows there are, with auto too")
        # Many processors multiply it slowly. These surround the edges of blocks.
        prompts = prompts[1::2]
    options = {"dtype": dtype, "max_num_batched_tokens": 1024}
    with start_engine(EMBEDDED, PRESET, {"codebooks": codebooks}, **options) as engine:
        alone = engine.complete(prompts, together=False)
        for chunk in (1024, 67, 256):
            engine.start_anew(chunk)
            assert_same_bits(engine.complete(prompts), alone)
            cached = engine.complete(prompts)
            assert_same_bits(cached, alone)
            assert any(completion.num_cached_tokens for completion in cached)
