"""Attention that falls on the tokens a policy keeps, at equal numbers of tokens (LogQuant, figure 4)."""

from typing import Any

import torch
from matplotlib.figure import Figure as Canvas

from research.figures.activations import LayerRows
from research.figures.scene import Scene, track
from research.figures.style import canvas, label, lines
from research.literature.h2o import HeavyHitters
from research.literature.logquant import LogQuant
from research.literature.retention import sliding
from research.literature.streamingllm import SinksAndWindow

#: W of LogQuant, which keeps up to 3W tokens; 42 is the paper's.
WINDOWS = (14, 28, 42, 84)
LOG, SLIDING, STREAMING, H2O = "log-distributed (LogQuant)", "sliding", "StreamingLLM", "H2O"


def numbers(scene: Scene) -> dict[str, Any]:
    """Mean share of the attention of queries that have more tokens behind them than are kept, in plain layers."""
    windows = [window for window in WINDOWS if 3 * window < scene.context]
    layers = scene.plain_layers()
    kept: list[float] = []
    shares: dict[str, list[float]] = {LOG: [], SLIDING: [], STREAMING: [], H2O: []}
    for window in track(windows, "coverage"):
        spread = kept_by_table(LogQuant(2, window).last_query(scene.context))[0, 0]
        full = slice(3 * window, None)
        mean = float(spread[full].sum(-1).float().mean())
        budget = round(mean)
        kept.append(mean)
        recent = kept_by_table(sliding(budget)(scene.context))
        of_layers: dict[str, list[float]] = {name: [] for name in shares}
        for rows in layers:
            heavy = HeavyHitters(budget).visible(rows.query[None], rows.key[None], rows.rules.scale)
            first = SinksAndWindow(budget).visible(rows.query[None], rows.key[None], rows.rules.scale)
            for name, mask in zip(shares, (spread[None, None], recent, first, heavy), strict=True):
                of_layers[name].append(mass_on(mask.to(rows.key.device), rows, full))
        for name, values in of_layers.items():
            shares[name].append(sum(values) / len(values))
    return {"windows": windows, "mean_tokens_kept": kept, "share_of_attention": shares}


def kept_by_table(last_query: torch.Tensor) -> torch.Tensor:
    """(1, 1, num_tokens, num_tokens) bool, True where query i still finds row j."""
    positions = torch.arange(len(last_query))
    return ((positions <= positions[:, None]) & (positions[:, None] <= last_query))[None, None]


def mass_on(kept: torch.Tensor, rows: LayerRows, queries: slice) -> float:
    """Mean share of the attention of these queries on kept rows.

    `kept` is (1, num_kv_heads or 1, num_tokens, num_tokens) bool.
    """
    total = 0.0
    for head in range(rows.key.shape[1]):
        mask = kept[0, head if kept.shape[1] > 1 else 0]
        for query_head in rows.heads_of(head):
            total += float((query_head.attention * mask)[queries].sum(-1).mean())
    return total / rows.query.shape[1]


def draw(numbers: dict[str, Any]) -> Canvas:
    """One line a policy over the number of tokens kept."""
    figure, (panel,) = canvas("Attention on the tokens that are kept")
    shares = {name: [100 * value for value in values] for name, values in numbers["share_of_attention"].items()}
    lines(panel, numbers["mean_tokens_kept"], shares)
    label(panel, "Mean over layers, heads and queries", "tokens kept (mean over queries)", "share of the attention (%)")
    return figure
