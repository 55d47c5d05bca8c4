"""What is counted of prompts on GPUs."""

import pytest

from research.prefill_count import count
from research.sm_model.times import GPUS


@pytest.mark.parametrize("group", [4, 8])
def test_a_prompt_of_8k_takes_little_longer_than_attention_to_rows(group):
    assert count(8192, group, GPUS["H100"]).ratio <= 1.15


def test_longer_prompts_are_nearer_and_small_groups_farther():
    ratios = [count(num_tokens, 4, GPUS["H100"]).ratio for num_tokens in (1024, 8192, 16384)]
    assert ratios == sorted(ratios, reverse=True)
    assert count(8192, 1, GPUS["H100"]).ratio > 2


def test_our_calls_have_hardly_more_tiles_than_causal_attention():
    """As the early queries of a group of four fill a tile of rows, and the late ones three."""
    found = count(8192, 4, GPUS["H100"])
    assert found.flash < found.tiles < 1.03 * found.flash
