"""Heat maps of exact match on retrieval prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_antkv.errors import SettingsError
from vllm_antkv.evaluate.report import check_writable
from vllm_antkv.evaluate.retrieval import RetrievalReport

_SUFFIXES = (".png", ".svg")
_COLUMNS = 4


def check_figure(path: Path) -> None:
    """SettingsError when no figure can be written to `path`."""
    if path.suffix not in _SUFFIXES:
        raise SettingsError(f"{path} must end in {' or '.join(_SUFFIXES)}.")
    check_writable(path)


def write_heat_map(path: Path, reports: Sequence[RetrievalReport]) -> None:
    """Exact match over length and depth, one panel for each kind and method; PNG or SVG by the suffix of `path`."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(cell.kind for cell in reports[0].cells))
    columns = min(4, len(reports))
    rows = -(-len(reports) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.3 * rows * len(kinds)), layout="constrained")
    axes = figure.subplots(rows * len(kinds), columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for at, (kind, result) in enumerate((kind, result) for kind in kinds for result in reports):
        of_kind, index = divmod(at, len(reports))
        axis = axes[of_kind * rows + index // columns][index % columns]
        _draw(axis, kind, result)
    image = axes[0][0].images[0]
    figure.colorbar(image, ax=axes, label="exact match", shrink=0.6)
    figure.savefig(path, dpi=150)


def _draw(axis: Any, kind: str, result: RetrievalReport) -> None:
    cells = {(cell.depth, cell.length): cell.exact_match for cell in result.cells if cell.kind == kind}
    depths, lengths = sorted({depth for depth, _ in cells}), sorted({length for _, length in cells})
    axis.set_axis_on()
    axis.imshow([[cells[d, n] for n in lengths] for d in depths], vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for y, depth in enumerate(depths):
        for x, length in enumerate(lengths):
            axis.text(x, y, f"{cells[depth, length]:.0%}", ha="center", va="center", fontsize=7)
    axis.set_xticks(range(len(lengths)), lengths, fontsize=7)
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    axis.set_title(f"{result.method}, {kind}", fontsize=8)
    axis.set_xlabel("tokens", fontsize=7)
    axis.set_ylabel("depth", fontsize=7)
