"""What was predicted stands beside what was measured; docs/gpu-log.md has the table as it is made here."""

from pathlib import Path

import pytest

from scripts.predictions import render
from scripts.sm_model.constants import Constants, measured
from scripts.sm_model.decode import Prediction

PAGE = Path(__file__).parents[2] / "docs" / "gpu-log.md"
MODEL = vars(Prediction(10.0, 0.0, 0.0, 0.0, 0.0, 2048, 800.0, {}, 0.0, 0.0, {}))


def cells(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


def test_nothing_is_measured_before_a_gpu_came():
    assert {row[1] for row in cells(render({}, {})).values()} == {""}


def test_measurements_stand_beside_predictions():
    flash = {"median_ms": 3.0}
    sides = {"FA3": flash, "antkv, CUDA": {"median_ms": 1.5}}
    decode = {"baseline": "FA3", "rows": [{"context": 32768, "batch": 8, "sides": sides}]}
    prefill = {"baseline": "FA3", "rows": [{"tokens": 8192, "timings": {"FA3": flash, "attend": {"median_ms": 3.6}}}]}
    constants = {"constants": {"mma_interval": 4.25}}
    results = {"first-decode default": decode, "prefill": prefill, "constants": constants}
    found = cells(render({"decode": {"antkv-1bit": MODEL}}, results))
    assert next(row for what, row in found.items() if "by default" in what)[1] == "2.0"
    assert next(row for what, row in found.items() if "8,192" in what)[1] == "1.20"
    assert found["`mma_interval`, cycles, or bytes or lines a cycle"] == ["6", "4.25"]


def test_a_side_that_could_not_run_is_not_measured():
    sides = {"FA3": {"median_ms": 3.0}, "antkv, CUDA": {"error": "why"}}
    decode = {"baseline": "FA3", "rows": [{"context": 32768, "batch": 8, "sides": sides}]}
    found = cells(render({}, {"first-decode default": decode}))
    assert {row[1] for row in found.values()} == {""}


def test_the_check_calibrates_the_model(tmp_path):
    """Its results are records by step."""
    path = tmp_path / "results.json"
    path.write_text('{"constants": {"result": {"constants": {"l2_bytes": 40.0}}}, "decode": {"result": null}}')
    assert measured(path) == Constants(l2_bytes=40.0)
    path.write_text('{"decode": {"result": null}}')
    with pytest.raises(ValueError, match="only constants"):
        measured(path)


def test_the_page_has_what_is_predicted():
    """Of decoding it says what the model said when it last ran."""
    page = cells(PAGE.read_text().partition("## Predicted and measured")[2].partition("\n## ")[0])
    made = cells(render({}, {}))
    assert list(page) == list(made)
    assert all(page[what] == row for what, row in made.items() if not what.startswith("decode"))
