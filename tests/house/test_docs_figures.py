"""The figures of quality and speed show the numbers of docs/results.md and docs/performance.md."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
QUALITY, SPEED = (json.loads((DOCS / "figures" / name).read_text()) for name in ("quality.json", "speed.json"))
#: What stands ahead of each model's table at 8,192 tokens.
TITLES = {"SmolLM2-135M-Instruct": "SmolLM2, perplexity in 16 bits 22.56", "Gemma-3-270M": "Gemma, 8,192 tokens"}


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def table(page, before):
    """The rows of the first table behind some words: texts of its cells, the header first."""
    text = (DOCS / page).read_text().split(before, 1)[1]
    header, _, *rows = re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()
    return [cells(header), *map(cells, rows)]


@pytest.mark.parametrize(("model", "title"), TITLES.items())
def test_quality(model, title):
    of_page = {}
    for cache, bits, _, kl, _ in table("results.md", title)[1:]:
        if name := re.fullmatch(r"(?:\*\*)?`([a-z]+)-([\d.]+)bit`(?:\*\*)?", cache):
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
    sizes = {cache.strip("`"): at_8k for cache, _, _, at_8k, _ in table("presets.md", "as vLLM reports them:")[1:]}
    compared = set()
    for cache, tokens, bits, *lost in table("is-it-for-me.md", "## Bytes and quality")[1:]:
        name = re.sub(r", (\d) bits", r"-\1bit", cache.strip("`")).lower()
        assert sizes.get(name, tokens) == tokens
        if name in results:
            (first_bits, first), (_, second) = results[name]
            assert (bits, *lost) == (first_bits, first, second)
            compared.add(name)
    assert compared == {"fp8", "turboquant-4bit", "kivi-2bit", "antkv-4bit", "antkv-2bit", "antkv-1bit"}
