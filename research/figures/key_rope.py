"""Keys before and after RoPE: how channels spread, and what vector quantisation loses (AnTKV, figure 8).

RoPE turns pairs of channels by the position, so that a channel that had a narrow range of its own takes on that of its
pair. Centroids of the 1-bit preset's form are learned by plain k-means from the keys of the calibration text, and the
error is measured on another: the same learning for both sides. RoPE keeps lengths, so that the errors compare.
"""

from typing import Any

import torch
from matplotlib.figure import Figure as Canvas

from research.figures.activations import LayerRows
from research.figures.scene import Scene, numbers_of, track
from research.figures.style import COLOURS, canvas, label, number_layers
from vllm_antkv.offline.kmeans import learn_centroids
from vllm_antkv.ops.reference import decode, encode
from vllm_antkv.ops.rope import rotate, unrotate
from vllm_antkv.presets import get_preset

BEFORE, AFTER = "before RoPE", "after RoPE"
#: Rows of the calibration text that are learned from, at most: 16 to a centroid.
MAX_ROWS = 4096


def numbers(scene: Scene) -> dict[str, Any]:
    """Of KV head 0 in every layer: standard deviation of each channel, and squared error of the quantisation."""
    sample = scene.request.sample
    assert sample is not None
    turned = [
        rotate(rows, torch.arange(rows.shape[1]), rotary.to("cpu"))
        for rows, rotary in zip(sample.plain_key, scene.rotaries, strict=True)
    ]
    learned_from = {BEFORE: sample.plain_key, AFTER: turned}
    measured: dict[str, list[torch.Tensor]] = {BEFORE: [], AFTER: []}

    def visit(rows: LayerRows) -> None:
        positions = torch.arange(scene.context, device=rows.key.device)
        measured[BEFORE].append(unrotate(rows.key, positions, scene.rotaries[rows.layer])[:, 0].cpu())
        measured[AFTER].append(rows.key[:, 0].cpu())

    scene.visit(visit)
    errors: dict[str, list[float]] = {BEFORE: [], AFTER: []}
    steps = [(side, layer) for side in errors for layer in range(len(measured[side]))]
    for side, layer in track(steps, "key-rope"):
        known = learned_from[side][layer][..., 0, :].flatten(0, 1)
        errors[side].append(coding_error(known[:: -(-len(known) // MAX_ROWS)], measured[side][layer]))
    return {
        "channel_deviation": {
            side: numbers_of(torch.stack([rows.std(0) for rows in layers])) for side, layers in measured.items()
        },
        "squared_error": errors,
    }


def coding_error(known: torch.Tensor, rows: torch.Tensor) -> float:
    """Mean squared error, per channel, of `rows` coded with centroids learned from `known`.

    Both are (num_tokens, head_size).
    """
    size = get_preset("antkv-1bit").sub_vector_size
    num_centroids = min(get_preset("antkv-1bit").num_centroids, len(known))
    points = known.unflatten(-1, (-1, size)).transpose(0, 1).float()
    centroids = learn_centroids(points, torch.ones(points.shape[:2]), num_centroids, seed=0)[None]
    back = decode(encode(rows[:, None].float(), centroids), centroids)[:, 0]
    return float((back - rows).square().mean())


def draw(numbers: dict[str, Any]) -> Canvas:
    """Spread of the channels of the middle layer, and the error of every layer."""
    figure, (spread, error) = canvas("Keys before and after RoPE (KV head 0)", 2)
    deviations = numbers["channel_deviation"]
    layer = len(deviations[BEFORE]) // 2
    for index, side in enumerate((BEFORE, AFTER)):
        spread.plot(deviations[side][layer], color=COLOURS[index], marker=".", label=side)
        values = numbers["squared_error"][side]
        bars = [position + 0.4 * (index - 0.5) for position in range(len(values))]
        error.bar(bars, values, width=0.4, color=COLOURS[index], label=side)
    number_layers(error)
    label(spread, f"Spread of each channel, layer {layer}", "channel", "standard deviation over tokens")
    label(error, "Vector quantisation at 1 bit, held-out text", "layer", "mean squared error of a channel")
    return figure
