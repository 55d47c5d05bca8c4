"""Draw docs/figures/quality.svg from docs/figures/quality.json: what docs/results.md shows at 8,192 tokens."""

import json
from pathlib import Path

from matplotlib.ticker import FixedLocator, NullLocator

from research.figures import style

NUMBERS = Path(__file__).parents[2] / "docs" / "figures" / "quality.json"
#: In bits.
_TICKS = (0.5, 1, 2, 4)
#: Where names stand, in points.
_SIDES = ({"xytext": (-5, -9), "ha": "right"}, {"xytext": (5, 3)})
_BELOW = {"xytext": (0, -12), "ha": "center"}


def main() -> None:
    """Write the figure."""
    numbers = json.loads(NUMBERS.read_text())
    figure, panels = style.canvas("What caches lose by their effective bits, windows of 8,192 tokens", len(numbers))
    figure.set_size_inches(8, 3.8)
    for panel, (model, methods) in zip(panels, numbers.items(), strict=True):
        for index, (family, points) in enumerate(methods.items()):
            bits, divergences = zip(*points.values(), strict=True)
            look = {"color": style.COLOURS[index], "marker": style.MARKERS[index], "label": family}
            panel.plot(bits, divergences, **look)
            for place, (name, point) in enumerate(points.items()):
                # In turns on either side, as some points nearly coincide.
                side = _SIDES[(len(points) - place) % 2] if len(points) > 1 else _BELOW
                panel.annotate(name, point, textcoords="offset points", fontsize=7, **side)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlim(0.5, 6)
        panel.set_ylim(0.0005, 2)
        panel.xaxis.set_major_locator(FixedLocator(_TICKS))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter("{x:g}")
        style.label(panel, model, "effective bits per element", "KL divergence, nats", legend=panel is panels[-1])
    style.save(figure, NUMBERS.parent, NUMBERS.stem, ("svg",))


if __name__ == "__main__":
    main()
