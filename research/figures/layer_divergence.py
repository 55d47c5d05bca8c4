"""How much each layer minds each preset: what `antkv calibrate` decides by (`calibrate.mix`)."""

from typing import Any

from matplotlib.figure import Figure as Canvas

from research.figures.scene import Scene, track
from research.figures.style import canvas, label, lines, number_layers
from vllm_antkv.errors import CodebookError
from vllm_antkv.offline.divergences import layer_divergences


def numbers(scene: Scene) -> dict[str, Any]:
    """Divergence when one layer alone goes through the codes of a preset, for every preset with one for all layers."""
    books = [book for book in map(scene.request.codebook, scene.presets) if book.header.layers is None]
    if not books:
        raise CodebookError("All codebooks here mix presets: layer-divergence needs one made with --bits uniform.")
    steps = iter(track(range(len(scene.windows) * scene.card.identity.num_layers), "layer-divergence"))
    found = layer_divergences(scene.model, books, scene.windows, lambda: next(steps, None)).nats
    return {"divergence": {book.preset.name: found[:, number].tolist() for number, book in enumerate(books)}}


def draw(numbers: dict[str, Any]) -> Canvas:
    """One line for each preset."""
    figure, (panel,) = canvas("How much each layer minds its codes")
    divergence = numbers["divergence"]
    layers = range(len(next(iter(divergence.values()))))
    lines(panel, layers, divergence)
    panel.set_yscale("log")
    number_layers(panel)
    label(panel, "One layer through codes, all others exact", "layer", "KL from the model's own predictions, nats")
    return figure
