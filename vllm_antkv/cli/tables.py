"""How commands show results: tables that break no name, number or path, and JSON instead."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

#: What fits every terminal.
WIDTH = 80
#: Of commands that show their result and need no file.
JsonInstead = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result to this file too; -: to stdout, in the place of the table."),
]


def table(*titles: str) -> Table:
    """A table with these columns: names in the first, on the left, and numbers in the others; titles may have lines."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for at, title in enumerate(titles):
        made.add_column(title, justify="right" if at else "left", no_wrap=True)
    return made


def print_table(made: Table) -> None:
    """On stdout, as wide as it is: a terminal that is narrower folds lines, and nothing is cut off."""
    console = Console()
    console.width = max(console.width, Measurement.get(console, console.options.update(max_width=10_000), made).maximum)
    console.print(made)


def wrapped(text: str, indent: int = 0) -> str:
    """The text in lines of WIDTH characters, those after the first indented. Words are never cut."""
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(lines)


def deliver(result: dict[str, Any], json: Path | None, show: Callable[[], None]) -> None:
    """Show a result as it is asked for; `json` is the value of JsonInstead."""
    from vllm_antkv.evaluate.report import as_json, write_json

    if json == Path("-"):
        sys.stdout.write(as_json(result))
        return
    if json is not None:
        write_json(json, result)
    show()
