"""What was measured outlives what fails later."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from vllm_antkv.evaluate.report import written_one_by_one


class Measured(BaseModel):
    method: str


def test_all_are_written_and_returned(tmp_path: Path) -> None:
    reports = [Measured(method="fp16"), Measured(method="antkv-1bit")]
    assert written_one_by_one(iter(reports), tmp_path / "out.json") == reports
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["method"] for result in results] == ["fp16", "antkv-1bit"]


def test_what_fails_later_leaves_what_was_measured(tmp_path: Path) -> None:
    def reports() -> Iterator[Measured]:
        yield Measured(method="fp16")
        raise MemoryError

    with pytest.raises(MemoryError):
        written_one_by_one(reports(), tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == {"results": [{"method": "fp16"}]}
