"""Error of every layer against the length of the intact prefix (IntactKV, figure 2)."""

from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from research.figures.activations import hidden_states
from research.figures.scene import Scene, numbers_of, track
from research.figures.style import BY_DEPTH, canvas, label
from vllm_antkv.offline.attention import quantised_past

SIZES = (0, 1, 2, 4, 8, 16, 32, 64)


def numbers(scene: Scene) -> dict[str, Any]:
    """Mean squared error of the hidden state after every decoder layer, at the tokens beyond the longest prefix."""
    window = scene.windows[0]
    exact = hidden_states(scene.model, window)
    error: dict[str, list[float]] = {}
    for size in track(SIZES, "intact-prefix"):
        method = scene.method(scene.preset, prefix=size, anchor_share=0.0, sinks=False)
        with quantised_past(scene.model, method, scene.context):
            quantised = hidden_states(scene.model, window)
        error[str(size)] = numbers_of((quantised - exact)[:, SIZES[-1] :].square().mean((1, 2)))
    return {"preset": scene.preset, "mean_squared_error": error}


def draw(numbers: dict[str, Any]) -> Canvas:
    """One line a layer over the length of the prefix, and the same relative to no prefix."""
    figure, (absolute, relative) = canvas(f"Error of the layers against the intact prefix ({numbers['preset']})", 2)
    errors = numbers["mean_squared_error"]
    layers = list(zip(*errors.values(), strict=True))
    places = range(len(errors))
    shades = ScalarMappable(Normalize(0, len(layers) - 1), BY_DEPTH)
    for layer, colour in zip(layers, shades.to_rgba(np.arange(len(layers))), strict=True):
        absolute.plot(places, layer, color=colour)
        relative.plot(places, [100 * e / layer[0] if layer[0] else 100 for e in layer], color=colour)
    absolute.set_yscale("log")
    for panel in (absolute, relative):
        panel.set_xticks(places, list(errors))
    x = "tokens in the intact prefix"
    label(absolute, "After each decoder layer", x, "mean squared error of the hidden state", legend=False)
    label(relative, "Relative to no prefix", x, "% of the error without a prefix", legend=False)
    figure.colorbar(shades, ax=relative, label="layer", ticks=MaxNLocator(integer=True))
    return figure
