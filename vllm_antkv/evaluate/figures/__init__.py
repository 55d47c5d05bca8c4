"""The papers' figures, drawn for any model: one file each, and the table that the CLI, the tests and the docs read."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure as Canvas

from vllm_antkv.errors import SettingsError
from vllm_antkv.evaluate.figures import (
    anchor_share,
    coverage,
    error_distribution,
    eviction_error,
    intact_prefix,
    key_rope,
    layer_divergence,
    score_map,
    sink_evolution,
    sink_tokens,
    token_error,
)
from vllm_antkv.evaluate.figures.scene import Scene


@dataclass(frozen=True)
class Figure:
    """One figure.

    numbers: measures what it shows, as JSON can hold it.
    draw: draws it from those numbers alone.
    """

    name: str
    numbers: Callable[[Scene], dict[str, Any]]
    draw: Callable[[dict[str, Any]], Canvas]

    @classmethod
    def of(cls, name: str, module: ModuleType) -> "Figure":
        """The figure that a file of this folder holds."""
        return cls(name, module.numbers, module.draw)


#: By the name that `antkv inspect --figures` takes, quickest first.
FIGURES: dict[str, Figure] = {
    name: Figure.of(name, module)
    for name, module in {
        "sink-evolution": sink_evolution,
        "score-map": score_map,
        "token-error": token_error,
        "error-distribution": error_distribution,
        "intact-prefix": intact_prefix,
        "key-rope": key_rope,
        "eviction-error": eviction_error,
        "coverage": coverage,
        "sink-tokens": sink_tokens,
        "layer-divergence": layer_divergence,
        "anchor-share": anchor_share,
    }.items()
}


def choose_figures(names: str | None) -> list[Figure]:
    """The figures named in a list separated by commas, all of them for None; SettingsError when there is none such."""
    chosen = list(FIGURES) if names is None else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in FIGURES:
            raise SettingsError(f"Unknown figure '{name}': choose among {', '.join(FIGURES)}.")
    return [FIGURES[name] for name in dict.fromkeys(chosen)]
