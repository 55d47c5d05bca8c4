import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope

from vllm_antkv.ops.rope import RotaryTable, angles_are_linear, rotate, unrotate

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
def test_unrotate_undoes_rotate(table, seed):
    rows, positions = draw_rows(seed, 9)
    torch.testing.assert_close(unrotate(rotate(rows, positions, table), positions, table), rows)


@given(tables, st.integers(0, 1000))
def test_rotate_undoes_unrotate_even_with_a_rounded_table(table, seed):
    rows, positions = draw_rows(seed, 9)
    rounded = RotaryTable(table.cos.bfloat16().float(), table.sin.bfloat16().float(), table.is_neox_style)
    torch.testing.assert_close(rotate(unrotate(rows, positions, rounded), positions, rounded), rows)


def test_rotate_is_the_rope_of_llama():
    rows, positions = draw_rows(0, 50)
    table = make_table(dtype=torch.float64)
    cos, sin = (torch.cat((half, half), -1)[positions][None] for half in (table.cos, table.sin))
    expected, _ = llama_rope(rows.transpose(0, 1)[None], rows.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotate(rows, positions, table), expected[0].transpose(0, 1))


def test_rotate_is_the_rope_of_gpt_j():
    rows, positions = draw_rows(0, 50)
    table = make_table(is_neox_style=False, dtype=torch.float64)
    expected = gptj_rope(rows[None], table.sin[positions][None], table.cos[positions][None])
    torch.testing.assert_close(rotate(rows, positions, table), expected[0])


def test_partial_rotation_leaves_the_other_channels_alone():
    rows, positions = draw_rows(0, 50)
    turned = rotate(rows, positions, make_table(rotary_dim=16))
    assert torch.equal(turned[..., 16:], rows[..., 16:])
    assert not torch.equal(turned[..., :16], rows[..., :16])


def test_position_0_turns_nothing():
    rows, _ = draw_rows(0, 5)
    assert torch.equal(rotate(rows, torch.zeros(5, dtype=torch.int64), make_table()), rows)


def test_logits_depend_on_distance_alone():
    rows, _ = draw_rows(0, 2)
    table = make_table(dtype=torch.float64)
    dots = []
    for shift in (0, 1, 1000):
        query, key = rotate(rows, torch.tensor([17 + shift, 5 + shift]), table)
        dots.append((query * key).sum(-1))
    torch.testing.assert_close(dots[1], dots[0])
    torch.testing.assert_close(dots[2], dots[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shape_and_dtype_are_kept(dtype):
    rows, positions = draw_rows(0, 7, dtype=torch.float32)
    for turn in (rotate, unrotate):
        turned = turn(rows.to(dtype), positions, make_table())
        assert turned.dtype == dtype
        assert turned.shape == rows.shape


def test_leading_dimensions_are_free():
    rows, positions = draw_rows(0, 12)
    flat = rotate(rows, positions, make_table())
    folded = rotate(rows.unflatten(0, (3, 4)), positions.unflatten(0, (3, 4)), make_table())
    assert torch.equal(folded.flatten(0, 1), flat)


def test_a_table_moves_with_its_style():
    table = make_table(is_neox_style=False).to("cpu")
    assert not table.is_neox_style
    assert table.rotary_dim == 64


@pytest.mark.parametrize("magnitude", [1.0, 1.2])
def test_angles_of_long_contexts_are_linear_but_for_their_rounding(magnitude):
    inverse_frequencies = 500000 ** -(torch.arange(0, 128, 2).float() / 128)
    angles = torch.outer(torch.arange(262144).float(), inverse_frequencies)
    assert angles_are_linear(RotaryTable(magnitude * angles.cos(), magnitude * angles.sin()))
    # As if the model changed its frequencies on the way.
    angles[1000:] *= 1.01
    assert not angles_are_linear(RotaryTable(magnitude * angles.cos(), magnitude * angles.sin()))
