"""Write the list of models of docs/compatibility.md: `python scripts/families_table.py` (`make docs` does so)."""

from pathlib import Path

from vllm_antkv.families import FAMILIES

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
_BEGIN = (
    "<!-- families: from vllm_antkv/configs/families.toml by scripts/families_table.py; `make docs` renews them -->\n\n"
)
_END = "\n<!-- end of families -->\n"


def render(page: str) -> str:
    """The page with the list of these families in its place."""
    before, rest = page.split(_BEGIN)
    after = rest.split(_END)[1]
    names = (f"{family.title} (`{family.architecture}`)" for family in FAMILIES.values() if family.served)
    return before + _BEGIN + ",\n".join(names) + ".\n" + _END + after


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
