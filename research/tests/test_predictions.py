"""What was predicted stands beside what was measured."""

from research.predictions import render
from research.sm_model.decode import Prediction

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
    prefill = {
        "baseline": "FA3",
        "rows": [{"tokens": 8192, "past": 0, "timings": {"FA3": flash, "attend": {"median_ms": 3.6}}}],
    }
    results = {"first-decode-default": decode, "prefill": prefill}
    found = cells(render({"decode": {"antkv-1bit": MODEL}}, results))
    assert next(row for what, row in found.items() if "by default" in what)[1] == "2.0"
    assert next(row for what, row in found.items() if "8,192" in what)[1] == "1.20"


def test_a_side_that_could_not_run_is_not_measured():
    sides = {"FA3": {"median_ms": 3.0}, "antkv, CUDA": {"error": "why"}}
    decode = {"baseline": "FA3", "rows": [{"context": 32768, "batch": 8, "sides": sides}]}
    found = cells(render({}, {"first-decode-default": decode}))
    assert {row[1] for row in found.values()} == {""}
