"""Write the table of models of docs/compatibility.md: `python scripts/families_table.py` (`make docs` does so)."""

from pathlib import Path

from vllm_antkv.families import FAMILIES, Family

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
_BEGIN = "<!-- families: from vllm_antkv/families.py by scripts/families_table.py; `make docs` renews them -->\n\n"
_END = "\n<!-- end of families -->\n"
_HEAD = "| family | tested in vLLM | attention and layers |\n|---|---|---|\n"


def render(page: str) -> str:
    """The page with the table of these families in its place."""
    before, rest = page.split(_BEGIN)
    after = rest.split(_END)[1]
    return before + _BEGIN + _HEAD + "".join(map(_row, FAMILIES.values())) + _END + after


def _row(family: Family) -> str:
    return f"| {family.title} (`{family.architecture}`) | {family.served or 'refused'} | {family.special} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
