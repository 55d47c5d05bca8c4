"""Every target of the fuzzer, for a moment and with the same inputs each time; longer: `python -m tests.fuzz`."""

from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given

from tests.fuzz.targets import TARGETS

same_file = hypothesis.settings(max_examples=100, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_not_understood_is_refused(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]

    @given(target.inputs)
    @same_file
    def fuzz(example: Any) -> None:
        target.check(example, tmp_path / "codebook")

    fuzz()
