"""The papers' figures, drawn for any model: one file each, and the table that the CLI, the tests and the docs read."""

from types import ModuleType

from research.figures import (
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
from vllm_antkv.errors import SettingsError

#: By the name that `--figures` takes, quickest first. `numbers` of a file measures what its figure shows,
#: as JSON can hold it; `draw` draws it from those alone.
FIGURES: dict[str, ModuleType] = {
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
}


def choose_figures(names: str | None) -> list[str]:
    """The figures named in a list separated by commas, all of them for None; SettingsError when there is none such."""
    chosen = list(FIGURES) if names is None else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in FIGURES:
            raise SettingsError(f"Unknown figure '{name}': choose among {', '.join(FIGURES)}.")
    return list(dict.fromkeys(chosen))
