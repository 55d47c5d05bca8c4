"""Draw docs/figures/by-position.svg: what caches lose by how many tokens came before.

`python -m research.figures.by_position NAME=FILE NAME=FILE` takes the numbers from files of `antkv eval compare`, one a
model, and keeps them in docs/figures/by-position.json. Without arguments it draws what is kept.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure as Canvas

from research.figures import style

NUMBERS = Path(__file__).parents[2] / "docs" / "figures" / "by-position.json"
#: By model and method, and by the first position of a band: KL divergence in nats.
Numbers = dict[str, dict[str, dict[str, float]]]


def numbers_of(given: Sequence[str]) -> Numbers:
    """What `NAME=FILE` arguments say."""
    files = dict(argument.split("=", 1) for argument in given)
    return {
        model: {
            method: {str(band["first"]): float(f"{band['kl']:.3g}") for band in fidelity["by_position"]}
            for method, fidelity in json.loads(Path(file).read_text())["fidelity"].items()
        }
        for model, file in files.items()
    }


def draw(numbers: Numbers) -> Canvas:
    """A panel a model, a line a method; what loses nothing anywhere has none, as the scale is logarithmic."""
    figure, panels = style.canvas("What caches lose by position", len(numbers))
    for panel, (model, methods) in zip(panels, numbers.items(), strict=True):
        lossy = {method: list(bands.values()) for method, bands in methods.items() if any(bands.values())}
        firsts = list(next(iter(methods.values())))
        style.lines(panel, range(len(firsts)), lossy)
        panel.set_xticks(range(len(firsts)), [f"{int(first):,}" for first in firsts])
        panel.set_yscale("log")
        style.label(panel, model, "from position", "KL divergence, nats")
    return figure


def main(given: Sequence[str]) -> None:
    """Write the figure."""
    if given:
        NUMBERS.write_text(json.dumps(numbers_of(given), indent=1) + "\n")
    style.save(draw(json.loads(NUMBERS.read_text())), NUMBERS.parent, NUMBERS.stem, ("svg",))


if __name__ == "__main__":
    main(sys.argv[1:])
