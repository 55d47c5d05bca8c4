"""Anchor Scores of every layer and KV head along one window, as a map (AnTKV, figure 9)."""

from typing import Any

import torch
from matplotlib.figure import Figure as Canvas

from research.figures.activations import LayerRows
from research.figures.equation_5 import equation_5
from research.figures.scene import Scene, numbers_of
from research.figures.style import canvas, label

#: Tokens that share a column, of which the largest score is shown.
TOKENS_PER_COLUMN = 8


def numbers(scene: Scene) -> dict[str, Any]:
    """(num_layers * num_kv_heads, num_columns) for K and for V."""
    key: list[torch.Tensor] = []
    value: list[torch.Tensor] = []

    def visit(rows: LayerRows) -> None:
        scores = equation_5(rows)
        key.append(_columns(scores.key))
        value.append(_columns(scores.value))

    scene.visit(visit)
    return {
        "tokens_per_column": TOKENS_PER_COLUMN,
        "num_kv_heads": scene.card.identity.num_kv_heads,
        "K": numbers_of(torch.cat(key)),
        "V": numbers_of(torch.cat(value)),
    }


def _columns(scores: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % TOKENS_PER_COLUMN))
    return padded.unflatten(1, (-1, TOKENS_PER_COLUMN)).amax(-1)


def draw(numbers: dict[str, Any]) -> Canvas:
    """Two maps, logarithmic."""
    figure, panels = canvas("Anchor Score by layer, KV head and position", 2)
    for panel, kind in zip(panels, ("K", "V"), strict=True):
        scores = torch.tensor(numbers[kind])
        end = scores.shape[1] * numbers["tokens_per_column"]
        image = panel.imshow(
            scores.clamp(min=1e-6).log10(),
            aspect="auto",
            interpolation="nearest",
            extent=(0, end, len(scores) / numbers["num_kv_heads"], 0),
            cmap="viridis",
        )
        panel.grid(False)
        figure.colorbar(image, ax=panel, label="log10 of the Anchor Score")
        label(panel, f"AnS of {kind}", "position of the token", "layer (KV heads within)", legend=False)
    return figure
