"""Outliers of the hidden state from layer to layer, and where they sit (KVSink, figures 4 and 12 to 17)."""

from typing import Any

from matplotlib.figure import Figure as Canvas

from research.figures.activations import hidden_states
from research.figures.scene import Scene, numbers_of
from research.figures.style import COLOURS, INK, canvas, label, lines, number_layers

#: Largest values of a layer that are followed.
TOP = 4


def numbers(scene: Scene) -> dict[str, Any]:
    """Largest and median magnitudes after every decoder layer, and the outlier channels along the first window."""
    magnitude = hidden_states(scene.model, scene.windows[0]).abs()
    rule = scene.request.codebook(scene.preset).header.sinks
    sample = scene.request.sample
    assert sample is not None
    layer, channels = (rule.layer, rule.channels) if rule else (sample.sink_layer, sample.sink_channels)
    largest = magnitude.flatten(1).topk(TOP).values
    return {
        "calibrated": rule is not None,
        "layer": layer,
        "channels": list(channels),
        "threshold": rule.threshold if rule else None,
        "largest": {f"largest {rank + 1}": numbers_of(largest[:, rank]) for rank in range(TOP)},
        "median": numbers_of(magnitude.flatten(1).median(dim=1).values),
        "by_channel": numbers_of(magnitude[layer].amax(0)),
        "by_token": {str(channel): numbers_of(magnitude[layer, :, channel]) for channel in channels},
        "channel_by_layer": {str(channel): numbers_of(magnitude[..., channel].amax(1)) for channel in channels},
    }


def draw(numbers: dict[str, Any]) -> Canvas:
    """Layers, channels of the emergence layer, tokens of the outlier channels."""
    found = "calibrated sinks" if numbers["calibrated"] else "no sinks found; strongest channel shown"
    figure, (layers, channels, tokens) = canvas(f"Outliers of the hidden state ({found})", 3)
    depth = range(len(numbers["median"]))
    lines(layers, depth, numbers["largest"])
    layers.plot(depth, numbers["median"], color=INK, linestyle="--", label="median")
    layers.set_yscale("log")
    layers.axvline(
        numbers["layer"],
        color=INK,
        linestyle=":",
        label="emergence layer" if numbers["calibrated"] else "layer shown",
    )
    number_layers(layers)
    label(layers, "Largest values of the first window", "after decoder layer", "magnitude of the hidden state")
    channels.plot(numbers["by_channel"], color=COLOURS[0], linewidth=0.8)
    for channel in numbers["channels"]:
        channels.annotate(str(channel), (channel, numbers["by_channel"][channel]))
    label(channels, f"After layer {numbers['layer']}", "channel", "largest magnitude over tokens", legend=False)
    for index, (channel, values) in enumerate(numbers["by_token"].items()):
        tokens.plot(values, color=COLOURS[index], linewidth=0.8, label=f"channel {channel}")
    if numbers["threshold"] is not None:
        tokens.axhline(numbers["threshold"], color=INK, linestyle=":", label="calibrated threshold")
    label(tokens, f"After layer {numbers['layer']}", "position of the token", "magnitude of the hidden state")
    return figure
