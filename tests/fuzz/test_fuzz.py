"""Every target of the fuzzer, for a moment and with the same inputs each time; longer: `--hypothesis-profile fuzz`."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_not_understood_is_refused(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]

    @given(target.inputs)
    @settings(suppress_health_check=list(HealthCheck))
    def fuzz(example: Any) -> None:
        target.check(example, tmp_path / "codebook")

    fuzz()
