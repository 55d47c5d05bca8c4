"""How all figures look, and how they are saved."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from vllm_antkv.whole_file import write_whole

#: Axes, text and what lines are compared with: a grey with a contrast of 4 with white and with the site's dark.
INK = "#7F7F7F"
#: Colours that stay apart for colour-blind readers (after Okabe and Ito), each with a contrast of 3 with either page.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07D00", "#2E96D1", INK, "#8B62C9")
#: From the first layer to the last: hues, as a light or a dark end would vanish on one of the pages.
BY_DEPTH = LinearSegmentedColormap.from_list("by depth", ("#2E96D1", "#8B62C9", "#D55E00"))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

#: Text stays text, and the same figure is the same bytes. Pages show through, whatever their colour: what a page's
#: style says does not reach its figures.
_LOOK = {
    "svg.fonttype": "none",
    "svg.hashsalt": "antkv",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 10,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.markersize": 4,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
    **{f"boxplot.{part}props.color": INK for part in ("box", "whisker", "cap")},
}
# For all that is drawn here: some is coloured when it is made and some when it is saved.
mpl.rcParams.update(_LOOK)
FORMATS = ("png", "svg")


def canvas(title: str, num_panels: int = 1) -> tuple[Canvas, list[Axes]]:
    """A figure of panels side by side under a title."""
    figure = Canvas(figsize=(5.2 * num_panels, 3.8), layout="constrained", dpi=100)
    panels = list(figure.subplots(1, num_panels, squeeze=False)[0])
    figure.suptitle(title, fontsize=11)
    return figure, panels


def label(panel: Axes, title: str, x: str, y: str, legend: bool = True) -> None:
    """Name a panel and its axes, and show the legend of its lines."""
    panel.set_title(title)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    if legend:
        panel.legend()


def number_layers(panel: Axes) -> None:
    """The horizontal axis counts layers: label as many as there is room for."""
    panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def legend_beside(figure: Canvas, panel: Axes, width: float) -> None:
    """Move a panel's legend out to the right, in a figure made as wide as both need, in inches."""
    handles, names = panel.get_legend_handles_labels()
    legend = panel.get_legend()
    if legend is not None:
        legend.remove()
    figure.set_size_inches(width, 4.0)
    figure.legend(handles, names, loc="outside right center")


def lines(panel: Axes, x: Sequence[float], named: Mapping[str, Sequence[float]]) -> None:
    """One line with markers for each name."""
    for index, (name, y) in enumerate(named.items()):
        panel.plot(x, y, label=name, color=COLOURS[index % 8], marker=MARKERS[index % 8])


def save(figure: Canvas, folder: Path, name: str, formats: Sequence[str] = FORMATS) -> None:
    """Write `name.png` and `name.svg`, each completely or not at all."""
    for form in formats:
        content = io.BytesIO()
        figure.savefig(content, format=form, metadata={"Date": None} if form == "svg" else None)
        write_whole(folder / f"{name}.{form}", content.getvalue())
