"""How a layer turns K is told from keys of one token at many positions."""

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from tests.unit.test_rope import make_table
from vllm_antkv.ops.rope import rotate
from vllm_antkv.ops.rope_detection import detect_rope, transformers_tables

HEAD_SIZE = 32


TABLES = [
    make_table(rotary_dim, base, is_neox_style=is_neox_style)
    for base in (1e4, 1e6)
    for rotary_dim in (8, HEAD_SIZE)
    for is_neox_style in (True, False)
]


def keys(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of one token, (1, num_kv_heads, head_size)."""
    return torch.randn(1, 2, HEAD_SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    seed=st.integers(0, 2**32),
    turn=st.integers(0, len(TABLES) - 1),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    last=st.integers(200, 4095),
)
def test_the_table_that_turns_is_found(seed, turn, dtype, last):
    positions = torch.linspace(0, last, 64).long()
    turned = rotate(keys(dtype, seed).expand(64, 2, HEAD_SIZE), positions, TABLES[turn])
    assert detect_rope(turned.float(), positions, TABLES, dtype) == turn


@given(seed=st.integers(0, 2**32))
def test_keys_that_are_equal_are_not_turned(seed):
    assert (
        detect_rope(keys(torch.float32, seed).expand(64, 2, HEAD_SIZE), torch.arange(64), TABLES, torch.float32) == -1
    )


def test_what_no_table_turns_is_told_apart():
    rows = keys(torch.float32, 0).expand(64, 2, HEAD_SIZE)
    turned = rotate(rows, torch.arange(64) ** 2, TABLES[0])
    assert detect_rope(turned, torch.arange(64), TABLES, torch.float32) is None
    assert detect_rope(torch.randn(64, 2, HEAD_SIZE), torch.arange(64), TABLES, torch.float32) is None


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_a_table_that_is_wider_than_a_head_is_left_alone(is_neox_style):
    wide = make_table(2 * HEAD_SIZE, is_neox_style=is_neox_style)
    assert detect_rope(torch.randn(64, 2, HEAD_SIZE), torch.arange(64), [wide], torch.float32) is None


@pytest.mark.parametrize("family", ["gpt_oss", "llama", "glm4"])
def test_a_table_is_as_wide_for_one_position_as_for_many(family):
    """Modules give a column for each pair of channels, or two side by side, or two apart."""
    config = AutoConfig.for_model(family, head_dim=HEAD_SIZE, hidden_size=4 * HEAD_SIZE, num_attention_heads=4)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    (kind,) = (each for name, each in vars(module).items() if name.endswith("RotaryEmbedding"))
    one, many = (
        [table.rotary_dim for table in transformers_tables(kind(config), num_positions, (), torch.device("cpu"))]
        for num_positions in (1, 64)
    )
    assert one == many
    assert one[0] == (HEAD_SIZE // 2 if family == "glm4" else HEAD_SIZE)
