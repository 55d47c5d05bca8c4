"""Comparing what two engines answered where their arithmetic rounds differently, as on GPUs."""

from math import inf

import pytest

from tests.serving.conftest import Completion

#: Share of all tokens that must be compared before answers part, or the comparison says nothing.
_MIN_COMPARED = 0.8


def assert_close(left: list[Completion], right: list[Completion], tolerance: float) -> None:
    """Same tokens and log-probabilities, request by request, up to where two candidates were as good as equal.

    There the answers may part, and what follows has another past and is not compared.
    """
    compared = sum(_compare(mine, theirs, tolerance) for mine, theirs in zip(left, right, strict=True))
    assert compared >= _MIN_COMPARED * sum(len(completion.tokens) for completion in left)


def _compare(mine: Completion, theirs: Completion, tolerance: float) -> int:
    """Compare one request; the number of tokens compared."""
    assert len(mine.tokens) == len(theirs.tokens)
    for step, (ours, others) in enumerate(zip(mine.top_logprobs, theirs.top_logprobs, strict=True)):
        common = ours.keys() & others.keys()
        assert len(common) >= 3, "candidates may change places only where they are close"
        for token in common:
            assert ours[token] == pytest.approx(others[token], abs=tolerance)
        chosen, other = mine.tokens[step], theirs.tokens[step]
        if chosen != other:
            assert ours[chosen] - ours.get(other, -inf) <= 2 * tolerance
            return step
    return len(mine.tokens)
