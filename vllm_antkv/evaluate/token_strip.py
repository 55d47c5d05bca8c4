"""The answer of a server, token by token, on the colour of its divergence."""

from pathlib import Path

import numpy as np

from vllm_antkv.evaluate.side_by_side import Comparison

#: Characters of a line, and inches of a character and of a line.
_COLUMNS, _WIDTH, _HEIGHT = 80, 0.085, 0.24
#: Share of the largest divergence from which on a colour is dark.
_DARK = 0.7


def write_token_strip(path: Path, found: Comparison) -> None:
    """PNG or SVG by the suffix of `path`; the first token in whose place this server has another is framed."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    cells = _laid_out([token.token for token in found.tokens])
    lines = cells[-1][1] + 1
    figure = Figure(figsize=(_COLUMNS * _WIDTH, lines * _HEIGHT + 1.2), layout="constrained")
    axis = figure.subplots()
    divergences = np.array([token.kl for token in found.tokens])
    colours = ScalarMappable(Normalize(0, divergences.max() or 1), colormaps["YlOrRd"])
    for at, ((x, y, text), colour) in enumerate(zip(cells, colours.to_rgba(divergences), strict=True)):
        edge = "black" if at == found.first_difference else "none"
        axis.add_patch(Rectangle((x, y), len(text), 0.9, facecolor=colour, edgecolor=edge))
        ink = "white" if divergences[at] > _DARK * divergences.max() else "black"
        axis.text(x, y + 0.5, text, family="monospace", fontsize=8, va="center", color=ink, parse_math=False)
    axis.set(xlim=(0, _COLUMNS), ylim=(lines, 0))
    axis.set_axis_off()
    axis.set_title(f"{found.servers[1]}, KL to {found.servers[0]}", fontsize=8)
    figure.colorbar(colours, ax=axis, orientation="horizontal", label="nats", aspect=60)
    figure.savefig(path, dpi=150)


def _laid_out(tokens: list[str]) -> list[tuple[int, int, str]]:
    """Column, line and text of each token; one that does not fit begins a line."""
    cells, x, y = [], 0, 0
    for token in tokens:
        text = repr(token)[1:-1][:_COLUMNS]
        if x + len(text) > _COLUMNS:
            x, y = 0, y + 1
        cells.append((x, y, text))
        x += len(text)
    return cells
