"""Pages that are made from code are those of this code; figures have the numbers of pages, and of what computes them.

docs/presets.md and docs/compatibility.md show what vLLM and `antkv plan` compute.
"""

import json
import re

import pytest

from scripts import capacity_figure, hybrid_figure
from scripts.written_pages import FAMILY_LIST, SETTINGS, settings_page, with_families
from tests.places import ROOT
from vllm_antkv.config import AntKVConfig


def test_the_settings_page_is_current():
    """Run `make docs` when it is not."""
    assert SETTINGS.read_text() == settings_page()


def test_the_table_of_families_is_current():
    """Run `make docs` when it is not."""
    page = FAMILY_LIST.read_text()
    assert page == with_families(page)


def test_every_setting_says_what_it_does():
    assert all(field.description for field in AntKVConfig.model_fields.values())
    schema = json.dumps(AntKVConfig.model_json_schema())
    assert '"additionalProperties": false' in schema


DOCS = ROOT / "docs"


def cells(row):
    return [cell.strip(" `") for cell in row.strip("|").split("|")]


def table(page, before):
    """The rows of the first table behind some words: texts of its cells, the header first."""
    text = (DOCS / page).read_text().split(before, 1)[1]
    header, _, *rows = re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()
    return [cells(header), *map(cells, rows)]


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
    (_, *lengths), *rows = table("presets.md", "as vLLM reports them:")
    places = [NUMBERS["lengths"].index(int(length)) for length in lengths]
    assert len(places) >= 4
    expected = {"fp8": [2.0] * len(places)} | {
        name: [ratios[place] for place in places] for name, ratios in NUMBERS["relative to auto"].items()
    }
    assert {name: list(map(float, ratios)) for name, *ratios in rows} == expected


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
    (_, *columns), *rows = table("compatibility.md", "as `antkv plan` does;")
    expected = {name: [gains[column] for column in columns] for name, gains in numbers.items()}
    assert {name: list(map(float, gains)) for name, *gains in rows} == expected


QUALITY, SPEED = (json.loads((DOCS / "figures" / name).read_text()) for name in ("quality.json", "speed.json"))
#: What stands ahead of each model's table at 8,192 tokens.
TITLES = {"SmolLM2-135M-Instruct": "SmolLM2, perplexity in 16 bits 22.56", "Gemma-3-270M": "Gemma, 8,192 tokens"}


@pytest.mark.parametrize(("model", "title"), TITLES.items())
def test_quality(model, title):
    of_page = {}
    for cache, bits, _, kl, _ in table("results.md", title)[1:]:
        if name := re.fullmatch(r"([a-z]+)-([\d.]+)bit", cache.strip("*`")):
            of_page[name[1], f"{name[2]} bit"] = [float(bits), float(kl)]
    of_figure = {
        (method.lower(), name): point for method, points in QUALITY[model].items() for name, point in points.items()
    }
    assert of_figure == of_page


def test_speed_on_cpus():
    header, *rows = table("performance.md", "## CPU")
    assert [int(cell.split()[0].replace(",", "")) for cell in header[2:]] == SPEED["CPU"]["tokens"]
    of_page = {
        (who, what): [float(ratio) for ratio in ratios if ratio]
        for who, what, *ratios in rows
        if "to" not in str(ratios)
    }
    of_figure = {(who, what): ratios for what in ("decode", "prefill") for who, ratios in SPEED["CPU"][what].items()}
    assert of_figure == of_page


def test_speed_on_a_gpu():
    header, *rows = table("performance.md", "## GPU")
    assert [row[0] for row in rows] == SPEED["GPU"]["tokens x requests"]
    columns = zip(*(map(float, row[1:]) for row in rows), strict=True)
    assert dict(zip(header[1:], map(list, columns), strict=True)) == SPEED["GPU"]["milliseconds"]


def test_the_comparison_has_the_figures_of_the_other_pages():
    """docs/is-it-for-me.md repeats them."""
    results = {}
    for title in TITLES.values():
        for cache, bits, lost, *_ in table("results.md", title)[1:]:
            results.setdefault(cache.strip("*`"), []).append((bits, lost))
    sizes = {cache: at_8k for cache, _, _, at_8k, _ in table("presets.md", "as vLLM reports them:")[1:]}
    compared = set()
    for cache, tokens, bits, *lost in table("is-it-for-me.md", "## Bytes and quality")[1:]:
        name = re.sub(r", (\d) bits", r"-\1bit", cache).lower()
        assert sizes.get(name, tokens) == tokens
        if name in results:
            (first_bits, first), (_, second) = results[name]
            assert (bits, *lost) == (first_bits, first, second)
            compared.add(name)
    assert compared == {"fp8", "turboquant-4bit", "kivi-2bit", "antkv-4bit", "antkv-2bit", "antkv-1bit"}
