"""Write the table of models of docs/compatibility.md: `python scripts/families_table.py` (`make docs` does so)."""

from pathlib import Path

from vllm_antkv.families import FAMILIES, Family

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
_BEGIN = "<!-- families: from vllm_antkv/families.py by scripts/families_table.py; `make docs` renews them -->\n\n"
_END = "\n<!-- end of families -->\n"
_HEAD = (
    "family",
    "in real vLLM, random weights",
    "trained weights",
    "calibrated offline",
    "evaluated offline",
    "special",
)
_OTHERS = (
    (
        "quantised weights of these",
        "run: [Features](#features)",
        "untested",
        "run: with the original, or through vLLM's own forward pass",
        "untested",
        "",
    ),
    (
        "all others",
        "served with a warning, if all layers are of the kinds above",
        "untested",
        "all, by vLLM's own forward pass where transformers' code does not hand over K and V (run: GPT-J)",
        "where it does",
        "experts, norms, RoPE of any kind or none, in some layers or all",
    ),
)


def render(page: str) -> str:
    """The page with the table of these families in its place."""
    before, rest = page.split(_BEGIN)
    after = rest.split(_END)[1]
    rows = (_HEAD, ("---",) * len(_HEAD), *map(_cells, FAMILIES.values()), *_OTHERS)
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"{before}{_BEGIN}{table}{_END}{after}"


def _cells(family: Family) -> tuple[str, ...]:
    return (
        f"{family.title} (`{family.architecture}`)",
        family.served or "refused",
        family.trained or ("untested" if family.served else "refused"),
        "run",
        "run" if family.evaluated else "refused",
        family.special,
    )


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
