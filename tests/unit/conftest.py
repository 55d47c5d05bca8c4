"""What tests of refusals share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

Refused = Callable[..., AbstractContextManager[pytest.ExceptionInfo[BaseException]]]


@pytest.fixture
def refused(reads_well: Callable[[BaseException], str]) -> Refused:
    """`refused(kind, *words)`: a block that must end with an error of this kind: one sentence with these words."""

    @contextmanager
    def expect(kind: type[BaseException], *words: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        with pytest.raises(kind) as caught:
            yield caught
        sentence = reads_well(caught.value)
        for each in words:
            assert each in sentence

    return expect
