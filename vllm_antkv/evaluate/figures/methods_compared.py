"""Perplexity against effective bits, for every method of the registry that can be built (AnTKV, table 1)."""

from typing import Any

from matplotlib.figure import Figure as Canvas

from vllm_antkv.errors import CodebookError, SettingsError
from vllm_antkv.evaluate.effective_bits import effective_bits
from vllm_antkv.evaluate.figures.scene import Scene, track
from vllm_antkv.evaluate.figures.style import COLOURS, MARKERS, canvas, label, legend_beside
from vllm_antkv.evaluate.methods import METHODS
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.traits import layer_traits


def numbers(scene: Scene) -> dict[str, Any]:
    """Perplexity, nominal and effective bits of each; methods that cannot be computed for this model are left out."""
    methods = [method for name in METHODS if (method := _built(scene, name)) is not None]
    return {
        "recency": scene.request.config.recency,
        "methods": {
            method.name: {
                "perplexity": scene.full_perplexity if method.name == "fp16" else scene.perplexity(method),
                "nominal_bits": method.nominal_bits,
                "effective_bits": effective_bits(
                    method, scene.card.identity, scene.card.dtype, scene.context, scene.card.windows
                ),
            }
            for method in track(methods, "methods")
        },
    }


def _built(scene: Scene, name: str) -> Method | None:
    try:
        method = scene.method(name)
    except (CodebookError, SettingsError):
        return None
    is_plain = all(traits.is_plain(scene.context) for traits in layer_traits(scene.model))
    return method if is_plain or method.eviction is None else None


def draw(numbers: dict[str, Any]) -> Canvas:
    """One line a family, its members joined in the order of their bits."""
    figure, (panel,) = canvas(f"Methods compared (recency {numbers['recency']})")
    families: dict[str, list[dict[str, float]]] = {}
    for name, values in numbers["methods"].items():
        families.setdefault(name.split("-")[0], []).append(values)
    full = families.pop("fp16")[0]["perplexity"]
    for index, (family, members) in enumerate(families.items()):
        ordered = sorted(members, key=lambda member: member["effective_bits"])
        panel.plot(
            [member["effective_bits"] for member in ordered],
            [100 * (member["perplexity"] / full - 1) for member in ordered],
            label=family,
            color=COLOURS[index % 8],
            marker=MARKERS[index % 8],
            linestyle="-" if index < 8 else "--",
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    panel.set_yscale("symlog", linthresh=1)
    panel.axhline(0, color="black", linestyle="--", linewidth=0.8)
    label(
        panel,
        f"Left and low is better; full precision: {full:.2f}",
        "effective bits per K or V element",
        "perplexity above full precision (%)",
    )
    legend_beside(figure, panel, 7.5)
    return figure
