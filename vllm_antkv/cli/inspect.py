"""`antkv inspect`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vllm_antkv.cli.options import Context, KeptOptions, Model, Text, grouped


@dataclass(frozen=True)
class FigureOptions:
    """What is drawn, and what it is learned from and measured on."""

    figures: Annotated[str | None, typer.Option(help="Names of figures, separated by commas; without it, all.")] = None
    calibration: Annotated[
        Path | None, typer.Option(help="Text to learn from. Without it: the windows of --text after those shown.")
    ] = None
    context: Context = 2048
    max_windows: Annotated[int, typer.Option(min=1, help="Windows that perplexity is measured on.")] = 2


@grouped
def inspect(
    model: Model,
    text: Text,
    out: Annotated[Path, typer.Option(help="Folder for the figures: NAME.png, NAME.svg, and NAME.json with numbers.")],
    kept: KeptOptions,
    drawn: FigureOptions,
) -> None:
    """Draw the papers' figures for a model: errors, Anchor Scores, sinks, perplexity against anchors, bits, prefix.

    Example: `antkv inspect MODEL --text FILE --codebooks DIR --out DIR`

    A figure that is there with the same settings is not measured again, so a killed run continues where it stopped.
    """
    from vllm_antkv.evaluate.figures import choose_figures
    from vllm_antkv.evaluate.figures.run import Inspection, inspect_model

    chosen = choose_figures(drawn.figures)
    of = Inspection(model, text, kept.config(), drawn.calibration, drawn.context, drawn.max_windows)
    for name, known in inspect_model(of, chosen, out):
        print(f"{out / name}.svg" + (" (measured before)" if known else ""))
