"""Draw docs/figures/capacity.svg from the numbers of `python -m scripts.capacity_figure`."""

import json

from research.figures import style
from scripts.capacity_figure import NUMBERS


def main() -> None:
    """Write the figure."""
    numbers = json.loads(NUMBERS.read_text())
    lengths = numbers["lengths"]
    figure, (panel,) = style.canvas("Tokens in the same cache memory, relative to auto (Llama-3-8B)")
    style.lines(panel, lengths, numbers["relative to auto"])
    panel.axhline(2, color=style.INK, linestyle="--", label="fp8")
    panel.axhline(1, color=style.INK, linestyle=":", label="auto (16 bit)")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xticks(lengths, [f"{length // 1024}K" if length >= 1024 else str(length) for length in lengths])
    panel.set_yticks((1, 2, 4, 8, 16, 32), ["1x", "2x", "4x", "8x", "16x", "32x"])
    style.label(panel, "", "longest request, tokens (--max-model-len)", "tokens held, relative to auto")
    style.legend_beside(figure, panel, width=6.8)
    style.save(figure, NUMBERS.parent, NUMBERS.stem, ("svg",))


if __name__ == "__main__":
    main()
