"""Where two answers part."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_antkv.evaluate.side_by_side import first_difference
from vllm_antkv.evaluate.token_strip import _laid_out

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(TOKENS, TOKENS)
def test_everything_before_the_first_difference_is_the_same(mine: list[int], theirs: list[int]) -> None:
    at = first_difference(mine, theirs)
    assert (at is None) == (mine == theirs)
    if at is not None:
        assert mine[:at] == theirs[:at]
        assert mine[at : at + 1] != theirs[at : at + 1]


@given(st.lists(st.text(min_size=1, max_size=30), max_size=30))
def test_tokens_of_a_strip_follow_each_other_on_lines_of_80_characters(tokens: list[str]) -> None:
    cells = _laid_out(tokens)
    assert len(cells) == len(tokens)
    assert all(x + len(text) <= 80 for x, _, text in cells)
    assert [(y, x) for x, y, _ in cells] == sorted((y, x) for x, y, _ in cells)
