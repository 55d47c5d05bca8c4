"""N attention sinks against the first N tokens in full precision (KVSink, figure 9, on KVQuant as in its table 2)."""

from typing import Any

from matplotlib.figure import Figure as Canvas

from research.figures.scene import Scene, track
from research.figures.style import INK, canvas, label, lines

BASE = "kvquant-2bit"
COUNTS = (0, 5, 10, 15, 20)
#: Addition to a method -> what it keeps.
KEPT = {"kvsink": "KVSink-N: the N strongest sinks so far", "pfn": "PFN-N: the first N tokens"}


def numbers(scene: Scene) -> dict[str, Any]:
    """Perplexity, and divergence from full precision, of both at every N."""
    methods = {
        (name, count): scene.method(f"{BASE}+{addition}-{count}" if count else BASE)
        for addition, name in KEPT.items()
        for count in COUNTS
    }
    perplexity: dict[str, list[float]] = {name: [] for name in KEPT.values()}
    divergence: dict[str, list[float]] = {name: [] for name in KEPT.values()}
    for name, count in track(methods, "sink-tokens"):
        perplexity[name].append(scene.perplexity(methods[name, count]))
        divergence[name].append(scene.divergence(methods[name, count]))
    return {
        "base": BASE,
        "counts": COUNTS,
        "fp16": scene.full_perplexity,
        "perplexity": perplexity,
        "kl_divergence": divergence,
    }


def draw(numbers: dict[str, Any]) -> Canvas:
    """Two lines over N, for perplexity and for divergence."""
    figure, (perplexity, divergence) = canvas(f"Sinks or first tokens in full precision, on {numbers['base']}", 2)
    lines(perplexity, numbers["counts"], numbers["perplexity"])
    perplexity.axhline(numbers["fp16"], color=INK, linestyle="--", label="full precision")
    lines(divergence, numbers["counts"], numbers["kl_divergence"])
    divergence.set_ylim(bottom=0)
    for panel in (perplexity, divergence):
        panel.set_xticks(numbers["counts"])
    label(perplexity, "Perplexity of the text", "tokens in full precision (N)", "perplexity")
    label(
        divergence, "Distance from the model's own predictions", "tokens in full precision (N)", "KL divergence (nats)"
    )
    return figure
