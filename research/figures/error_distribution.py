"""How the output errors of single tokens spread over the layers (AnTKV, figure 10)."""

from typing import Any

import torch
from matplotlib.figure import Figure as Canvas

from research.figures.activations import LayerRows
from research.figures.row_error import row_errors
from research.figures.scene import Scene, numbers_of
from research.figures.style import COLOURS, canvas, label

#: Of the errors of a layer's rows: whiskers, box, median.
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
#: Shares of the tokens with the largest errors, for the share of all error that they make.
SHARES = (0.01, 0.02, 0.05, 0.10, 0.20, 0.50)


def numbers(scene: Scene) -> dict[str, Any]:
    """Quantiles per layer, and the share of the error that the worst tokens make, for K and V."""
    method = scene.method(scene.preset)
    result: dict[str, Any] = {
        "preset": scene.preset,
        "quantiles": QUANTILES,
        "shares": SHARES,
        **{kind: {"errors": [], "worst": []} for kind in "KV"},
    }

    def visit(rows: LayerRows) -> None:
        errors = row_errors(rows, *scene.coded(method, rows), rows.visible)
        for kind, of_kind in zip("KV", (errors.key, errors.value), strict=True):
            result[kind]["errors"].append(numbers_of(of_kind.flatten().quantile(torch.tensor(QUANTILES).to(of_kind))))
            result[kind]["worst"].append(numbers_of(worst_tokens(of_kind)))

    scene.visit(visit)
    return result


def worst_tokens(errors: torch.Tensor) -> torch.Tensor:
    """Share of all error that the worst `SHARES` of the tokens of each head make; errors (num_kv_heads, num_tokens)."""
    made = errors.sort(dim=-1, descending=True).values.cumsum(-1)
    counts = torch.tensor([max(1, round(share * errors.shape[1])) for share in SHARES], device=errors.device)
    return (made[:, counts - 1] / made[:, -1:]).mean(0)


def draw(numbers: dict[str, Any]) -> Canvas:
    """Boxes per layer for K and V, and how few tokens make how much of the error."""
    figure, (*boxes, share) = canvas(f"Distribution of the error of single tokens ({numbers['preset']})", 3)
    for panel, kind in zip(boxes, "KV", strict=True):
        panel.bxp(
            [
                {"whislo": low, "q1": q1, "med": median, "q3": q3, "whishi": high, "label": str(layer)}
                for layer, (low, q1, median, q3, high) in enumerate(numbers[kind]["errors"])
            ],
            showfliers=False,
        )
        panel.set_yscale("log")
        label(
            panel,
            f"{kind}: 1%, 25%, 50%, 75%, 99% of the tokens",
            "layer",
            "error of later attention outputs",
            legend=False,
        )
    for index, kind in enumerate("KV"):
        layers = torch.tensor(numbers[kind]["worst"])
        x = [100 * value for value in numbers["shares"]]
        share.plot(x, 100 * layers.mean(0), color=COLOURS[index], marker="o", label=f"{kind}, mean of layers")
        share.fill_between(
            x, 100 * layers.amin(0), 100 * layers.amax(0), color=COLOURS[index], alpha=0.15, label=f"{kind}, all layers"
        )
    share.set_xscale("log")
    share.set_ylim(0, 100)
    label(share, "Few tokens make much of the error", "tokens with the largest errors (%)", "share of all error (%)")
    return figure
