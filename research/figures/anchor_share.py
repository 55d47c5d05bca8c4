"""Perplexity against the share of anchors, for every preset (AnTKV, figures 11 to 13)."""

from typing import Any

from matplotlib.figure import Figure as Canvas

from research.figures.scene import Scene, track
from research.figures.style import INK, canvas, label, lines

SHARES = (0.0, 0.01, 0.02, 0.05, 0.10, 0.15, 0.20)


def numbers(scene: Scene) -> dict[str, Any]:
    """Perplexity of every preset that has a codebook, at every share."""
    steps = [(preset, share) for preset in scene.presets for share in SHARES]
    perplexity: dict[str, list[float]] = {preset: [] for preset in scene.presets}
    for preset, share in track(steps, "anchor-share"):
        perplexity[preset].append(scene.perplexity(scene.method(preset, anchor_share=share)))
    return {"shares": SHARES, "fp16": scene.full_perplexity, "perplexity": perplexity}


def draw(numbers: dict[str, Any]) -> Canvas:
    """One line for each preset."""
    figure, (panel,) = canvas("Perplexity against the share of anchors")
    lines(panel, [100 * share for share in numbers["shares"]], numbers["perplexity"])
    panel.axhline(numbers["fp16"], color=INK, linestyle="--", label="full precision")
    label(panel, "Anchors per VQ block of 128 tokens and KV head", "anchors (% of tokens)", "perplexity")
    return figure
