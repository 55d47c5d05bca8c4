"""Rotary tables: what they do to keys, their orders, and how a layer's own is told from keys at many positions."""

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rope

from vllm_antkv.ops.rope import RotaryTable, angles_are_linear, interleaved, reordered, rotate, unrotate
from vllm_antkv.ops.rope_detection import detect_rope, transformers_tables

MAX_POSITION = 4096


def make_table(rotary_dim=64, base=10_000.0, magnitude=1.0, is_neox_style=True, dtype=torch.float32):
    frequencies = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(MAX_POSITION, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (magnitude * angles.cos()).to(dtype), (magnitude * angles.sin()).to(dtype)
    return RotaryTable(cos, sin, is_neox_style)


tables = st.builds(
    make_table,
    rotary_dim=st.sampled_from([16, 32, 64]),
    base=st.sampled_from([1e4, 5e5]),
    magnitude=st.sampled_from([1.0, 1.37]),
    is_neox_style=st.booleans(),
)


def draw_rows(seed, num_tokens, heads=3, head_size=64, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_tokens, heads, head_size, generator=generator, dtype=dtype)
    return rows, torch.randint(0, MAX_POSITION, (num_tokens,), generator=generator)


@given(tables, st.integers(0, 1000))
def test_each_undoes_the_other_even_with_a_rounded_table(table, seed):
    rows, positions = draw_rows(seed, 9)
    rounded = RotaryTable(table.cos.bfloat16().float(), table.sin.bfloat16().float(), table.is_neox_style)
    for angles in (table, rounded):
        torch.testing.assert_close(unrotate(rotate(rows, positions, angles), positions, angles), rows)
        torch.testing.assert_close(rotate(unrotate(rows, positions, angles), positions, angles), rows)


def test_rotate_is_the_rope_of_gpt_j():
    rows, positions = draw_rows(0, 50)
    table = make_table(is_neox_style=False, dtype=torch.float64)
    expected = gptj_rope(rows[None], table.sin[positions][None], table.cos[positions][None])
    torch.testing.assert_close(rotate(rows, positions, table), expected[0])


@given(tables, st.integers(0, 1000))
def test_each_pair_turns_by_its_own_of_three_positions(table, seed):
    rows, first = draw_rows(seed, 9)
    positions = torch.stack((first, first.flip(0), (first + seed) % MAX_POSITION), dim=-1)
    sections = torch.randint(3, (table.rotary_dim // 2,), generator=torch.Generator().manual_seed(seed))
    three_part = replace(table, sections=sections)
    turned = rotate(rows, positions, three_part)
    of_channel = sections.repeat(2) if table.is_neox_style else sections.repeat_interleave(2)
    for section in range(3):
        channels = (of_channel == section).nonzero().flatten()
        expected = rotate(rows, positions[:, section], table)[..., channels]
        torch.testing.assert_close(turned[..., channels], expected)
    torch.testing.assert_close(unrotate(turned, positions, three_part), rows)


@given(tables, st.integers(0, 1000))
def test_sections_go_with_their_pairs(table, seed):
    rows, first = draw_rows(seed, 9)
    positions = torch.stack((first, first.flip(0), first.roll(1)), dim=-1)
    three_part = replace(table, sections=torch.arange(table.rotary_dim // 2) % 3)
    order = interleaved(table, 64, 4)
    turned = rotate(rows, positions, three_part)[..., order]
    torch.testing.assert_close(rotate(rows[..., order], positions, reordered(three_part, order)), turned)


@pytest.mark.parametrize("magnitude", [1.0, 1.2])
def test_angles_of_long_contexts_are_linear_but_for_their_rounding(magnitude):
    inverse_frequencies = 500000 ** -(torch.arange(0, 128, 2).float() / 128)
    angles = torch.outer(torch.arange(262144).float(), inverse_frequencies)
    assert angles_are_linear(RotaryTable(magnitude * angles.cos(), magnitude * angles.sin()))
    # As if the model changed its frequencies on the way.
    angles[1000:] *= 1.01
    assert not angles_are_linear(RotaryTable(magnitude * angles.cos(), magnitude * angles.sin()))


@given(tables, st.integers(0, 1000), st.sampled_from([2, 4, 8, 16, 32]))
def test_reordered_rows_are_turned_like_the_rows_they_come_from(table, seed, sub_vector_size):
    rows, positions = draw_rows(seed, 9)
    order = interleaved(table, rows.shape[-1], sub_vector_size)
    assert sorted(order) == list(range(rows.shape[-1]))
    turned = rotate(rows[..., order], positions, reordered(table, order))
    assert torch.equal(turned, rotate(rows, positions, table)[..., order])


@pytest.mark.parametrize(
    ("head_size", "rotary_dim", "sub_vector_size", "is_neox_style", "first"),
    [
        (128, 128, 8, True, [0, 8, 16, 24, 32, 40, 48, 56]),
        (64, 64, 8, True, [0, 4, 8, 12, 16, 20, 24, 28]),
        (64, 64, 8, False, [0, 1, 16, 17, 32, 33, 48, 49]),
        (128, 64, 8, True, [0, 4, 8, 12, 16, 20, 24, 28]),
        # Nothing to mix: one sub-vector for a half or a head, and sub-vectors that reach across halves.
        (64, 64, 32, True, list(range(32))),
        (32, 32, 32, True, list(range(32))),
        (80, 80, 16, True, list(range(16))),
    ],
)
def test_a_sub_vector_takes_pairs_of_all_frequencies(head_size, rotary_dim, sub_vector_size, is_neox_style, first):
    table = make_table(rotary_dim, is_neox_style=is_neox_style)
    order = interleaved(table, head_size, sub_vector_size)
    assert order[:sub_vector_size] == first
    assert order[rotary_dim:] == list(range(rotary_dim, head_size))


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_an_order_that_parts_a_pair_is_refused(is_neox_style):
    table = make_table(16, is_neox_style=is_neox_style)
    for order in ([1, *range(2, 16), 0], [*range(15), 16, 15], [0, 2, 1, *range(3, 18)]):
        with pytest.raises(ValueError, match="parts channels"):
            reordered(table, [*order, *range(len(order), 64)])


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
