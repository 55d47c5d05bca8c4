"""The output error that each token's code makes, against its Anchor Score (AnTKV, figures 1 and 9).

The error of a row is exact (`row_error`): the change of all later attention outputs of its head when this row alone is
coded. An oracle would keep the rows with the largest error; the share of that error that the same number of rows holds
when the Anchor Score picks them says how good the score is, and the rank correlation how well it orders all rows.
"""

from typing import Any

import torch
from matplotlib.figure import Figure as Canvas

from research.figures.activations import LayerRows
from research.figures.equation_5 import equation_5
from research.figures.row_error import RowScores, row_errors
from research.figures.scene import Scene, numbers_of
from research.figures.style import COLOURS, canvas, label

SHARES = (0.01, 0.02, 0.05, 0.10, 0.20)
ALONE, WEIGHTED = "Anchor Score", "Anchor Score times code error"


def numbers(scene: Scene) -> dict[str, Any]:
    """Per token (mean over layers and KV heads), per layer rank correlations, and shares of the oracle's error."""
    method = scene.method(scene.preset)
    errors: list[torch.Tensor] = []
    scores: dict[str, list[torch.Tensor]] = {ALONE: [], WEIGHTED: []}

    def visit(rows: LayerRows) -> None:
        coded = scene.coded(method, rows)
        errors.append(_both(row_errors(rows, *coded, rows.visible)))
        score = _both(equation_5(rows))
        made = torch.stack(
            [(code - row).norm(dim=-1).T for code, row in zip(coded, (rows.key, rows.value), strict=True)]
        )
        scores[ALONE].append(score)
        scores[WEIGHTED].append(score * made)

    scene.visit(visit)
    error = torch.stack(errors)
    by_score = {name: torch.stack(of_name) for name, of_name in scores.items()}
    kinds = ("K", "V")
    return {
        "preset": scene.preset,
        "per_token_error": {kind: numbers_of(error[:, i].mean((0, 1))) for i, kind in enumerate(kinds)},
        "per_token_score": {kind: numbers_of(by_score[ALONE][:, i].mean((0, 1))) for i, kind in enumerate(kinds)},
        "shares": SHARES,
        "rank_correlation": {
            name: {
                kind: [spearman(s, e) for s, e in zip(score[:, i], error[:, i], strict=True)]
                for i, kind in enumerate(kinds)
            }
            for name, score in by_score.items()
        },
        "share_of_oracle_error": {
            name: {kind: [covered(score[:, i], error[:, i], share) for share in SHARES] for i, kind in enumerate(kinds)}
            for name, score in by_score.items()
        },
    }


def spearman(score: torch.Tensor, error: torch.Tensor) -> float:
    """Mean over KV heads of the rank correlation over tokens; both (num_kv_heads, num_tokens)."""
    ranks = torch.stack([x.argsort(dim=-1).argsort(dim=-1).float() for x in (score, error)])
    ranks = ranks - ranks.mean(-1, keepdim=True)
    ranks = ranks / ranks.norm(dim=-1, keepdim=True)
    return float(ranks.prod(0).sum(-1).mean())


def covered(score: torch.Tensor, error: torch.Tensor, share: float) -> float:
    """Error of the tokens that `score` picks over that of the tokens with the largest error; (..., num_tokens)."""
    count = max(1, round(share * score.shape[-1]))
    picked = error.gather(-1, score.topk(count).indices)
    return float(picked.sum() / error.topk(count).values.sum())


def _both(scores: RowScores) -> torch.Tensor:
    """(2, num_kv_heads, num_tokens)."""
    return torch.stack((scores.key, scores.value))


def draw(numbers: dict[str, Any]) -> Canvas:
    """Errors by position, error against score, and what the score's choice holds of the oracle's."""
    figure, (by_position, scatter, bars) = canvas(
        f"Error of each token's code and its Anchor Score ({numbers['preset']})", 3
    )
    for index, (kind, errors) in enumerate(numbers["per_token_error"].items()):
        by_position.plot(errors, color=COLOURS[index], label=kind, linewidth=0.6)
        score = numbers["per_token_score"][kind]
        scatter.scatter(score, errors, s=4, color=COLOURS[index], label=kind, alpha=0.5, linewidths=0, rasterized=True)
    by_position.set_yscale("log")
    label(by_position, "Mean over layers and KV heads", "position of the token", "error of later attention outputs")
    scatter.set(xscale="log", yscale="log")
    label(scatter, "One point a token", "Anchor Score (AnTKV, eq. 5)", "error of later attention outputs")
    shares = [100 * share for share in numbers["shares"]]
    for index, (name, kinds) in enumerate(numbers["share_of_oracle_error"].items()):
        for style, (kind, values) in zip(("-", "--"), kinds.items(), strict=True):
            correlation = sum(numbers["rank_correlation"][name][kind]) / len(numbers["rank_correlation"][name][kind])
            bars.plot(
                shares,
                [100 * value for value in values],
                style,
                color=COLOURS[index],
                marker="o",
                label=f"{name}, {kind} (rank correlation {correlation:.2f})",
            )
    bars.set_ylim(0, 105)
    label(bars, "Chosen by the score or by an oracle", "tokens chosen (%)", "share of the oracle's error (%)")
    return figure
