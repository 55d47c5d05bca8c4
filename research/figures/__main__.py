"""Draw the papers' figures for a model: `python -m research.figures MODEL --text FILE --codebooks DIR --out DIR`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from research.figures import choose_figures
from research.figures.inspection import Inspection, inspect_model
from vllm_antkv import cli
from vllm_antkv.cli.options import Context, KeptOptions, Model, Text, grouped

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)


@dataclass(frozen=True)
class FigureOptions:
    """What is drawn, and what it is learned from and measured on."""

    figures: Annotated[str | None, typer.Option(help="Names of figures, separated by commas; without it, all.")] = None
    calibration: Annotated[
        Path | None, typer.Option(help="Text to learn from. Without it: the windows of --text after those shown.")
    ] = None
    context: Context = 2048
    max_windows: Annotated[int, typer.Option(min=1, help="Windows that perplexity is measured on.")] = 2


@app.command()
@grouped
def figures(
    model: Model,
    text: Text,
    out: Annotated[Path, typer.Option(help="Folder for the figures: NAME.png, NAME.svg, and NAME.json with numbers.")],
    kept: KeptOptions,
    drawn: FigureOptions,
) -> None:
    """Errors, Anchor Scores, sinks, perplexity against anchors, bits, prefix.

    A figure that is there with the same settings is not measured again, so a killed run continues where it stopped.
    """
    chosen = choose_figures(drawn.figures)
    of = Inspection(model, text, kept.config(), drawn.calibration, drawn.context, drawn.max_windows)
    for name, known in inspect_model(of, chosen, out):
        print(f"{out / name}.svg" + (" (measured before)" if known else ""))


def run(args: list[str]) -> int:
    """Run one command line and return its exit code."""
    return cli.run(args, app, "python -m research.figures")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
