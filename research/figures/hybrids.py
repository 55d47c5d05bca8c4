"""Draw docs/figures/hybrids.svg from the numbers of `python -m scripts.hybrid_figure`."""

import json

from research.figures import style
from scripts.hybrid_figure import NUMBERS

_PREFIX = "1 bit, "


def main() -> None:
    """Write the figure."""
    numbers = json.loads(NUMBERS.read_text())
    models = sorted(numbers, key=lambda name: max(numbers[name].values()))
    lengths = [column for column in numbers[models[0]] if column.startswith(_PREFIX)]
    figure, (panel,) = style.canvas("What a cache of 1 bit gains where layers keep states")
    figure.set_size_inches(6.8, 4.4)
    for index, column in enumerate(lengths):
        # The shortest on top.
        places = [place + 0.27 * (1 - index) for place in range(len(models))]
        gains = [numbers[name][column] for name in models]
        bars = panel.barh(
            places, gains, 0.25, color=style.COLOURS[index], label=f"{column.removeprefix(_PREFIX)} tokens"
        )
        panel.bar_label(bars, padding=2, fontsize=6)
    panel.axvline(1, color=style.INK, linestyle=":", label="auto (16 bit)")
    panel.set_yticks(range(len(models)), models)
    panel.grid(axis="y", visible=False)
    style.label(panel, "", "times fewer bytes than with auto", "")
    style.save(figure, NUMBERS.parent, NUMBERS.stem, ("svg",))


if __name__ == "__main__":
    main()
