"""docs/presets.md and its figure show what vLLM computes."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figure():
    spec = importlib.util.spec_from_file_location("capacity_figure", ROOT / "scripts" / "capacity_figure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def numbers(figure):
    return json.loads(figure.NUMBERS.read_text())


@pytest.mark.parametrize(("key", "shape"), [("relative to auto", "LLAMA_3_8B"), ("Gemma-3-27B", "GEMMA_3_27B")])
def test_the_numbers_are_those_of_vllm(figure, numbers, monkeypatch, key, shape):
    """At some of the lengths. Run `python -m scripts.capacity_figure` when they are not."""
    some = (512, 32768)
    monkeypatch.setattr(figure, "LENGTHS", some)
    places = [numbers["lengths"].index(length) for length in some]
    recorded = {name: [ratios[place] for place in places] for name, ratios in numbers[key].items()}
    assert figure.measure(getattr(figure, shape)) == recorded


def test_the_table_has_the_numbers(numbers):
    page = (ROOT / "docs" / "presets.md").read_text()
    header, *rows = re.findall(r"^\| (longest request|\d+) \| (.*) \|$", page, re.M)
    names = [name.strip("`") for name in header[1].split(" | ")]
    assert names == ["fp8", *numbers["relative to auto"]]
    assert len(rows) >= 6
    for length, cells in rows:
        place = numbers["lengths"].index(int(length))
        expected = [2.0, *(ratios[place] for ratios in numbers["relative to auto"].values())]
        assert [float(cell) for cell in cells.split(" | ")] == expected
