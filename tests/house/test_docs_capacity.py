"""docs/presets.md, docs/compatibility.md and their figures show what vLLM and `antkv plan` compute."""

import json
import re

import pytest

from scripts import capacity_figure, hybrid_figure
from tests.places import ROOT

NUMBERS = json.loads(capacity_figure.NUMBERS.read_text())


@pytest.mark.parametrize(("key", "shape"), [("relative to auto", "LLAMA_3_8B"), ("Gemma-3-27B", "GEMMA_3_27B")])
def test_the_numbers_are_those_of_vllm(monkeypatch, key, shape):
    """At some of the lengths. Run `python -m scripts.capacity_figure` when they are not."""
    some = (512, 32768)
    monkeypatch.setattr(capacity_figure, "LENGTHS", some)
    places = [NUMBERS["lengths"].index(length) for length in some]
    recorded = {name: [ratios[place] for place in places] for name, ratios in NUMBERS[key].items()}
    assert capacity_figure.measure(getattr(capacity_figure, shape)) == recorded


def test_the_table_has_the_numbers():
    page = (ROOT / "docs" / "presets.md").read_text()
    header, *rows = re.search(r"^\| longest request .*?\n\n", page, re.M | re.S)[0].strip().splitlines()
    places = [NUMBERS["lengths"].index(int(length)) for length in header.strip("| ").split(" | ")[1:]]
    assert len(places) >= 4
    table = dict(re.fullmatch(r"\| `(.+?)` \| (.*) \|", row).groups() for row in rows[1:])
    expected = {"fp8": [2.0] * len(places)} | {
        name: [ratios[place] for place in places] for name, ratios in NUMBERS["relative to auto"].items()
    }
    assert {name: [float(cell) for cell in cells.split(" | ")] for name, cells in table.items()} == expected


def test_presets_hold_what_was_promised():
    """Twelve times the tokens of `auto`; less where five of six layers have windows, past which `auto` frees too."""
    llama, gemma = (NUMBERS[key]["antkv-1bit"] for key in ("relative to auto", "Gemma-3-27B"))
    at = NUMBERS["lengths"].index
    assert llama[at(32768)] >= 12
    assert gemma[at(8192)] >= 6
    assert gemma[at(131072)] >= 11
    of_presets = [ratios[at(32768)] for ratios in NUMBERS["relative to auto"].values()]
    assert of_presets == sorted(set(of_presets)), "fewer bits hold more"


def test_what_hybrids_gain():
    """Of one model the numbers are computed anew. Run `python -m scripts.hybrid_figure` when they are not the same."""
    numbers = json.loads(hybrid_figure.NUMBERS.read_text())
    assert numbers["LFM2-350M"] == hybrid_figure.measure(hybrid_figure.MODELS["LFM2-350M"])
    page = (ROOT / "docs" / "compatibility.md").read_text()
    header, _, *rows = re.search(r"^\|model\|1 bit.*?\n\n", page, re.M | re.S)[0].strip().splitlines()
    columns = header.strip("|").split("|")[1:]
    table = {name: list(map(float, gains)) for name, *gains in (row.strip("|").split("|") for row in rows)}
    assert table == {name: [gains[column] for column in columns] for name, gains in numbers.items()}
