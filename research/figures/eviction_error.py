"""Error of attention outputs when tokens are coded, and when they are dropped instead (LogQuant, table 2)."""

from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas

from research.figures.coverage import kept_by_table
from research.figures.scene import Scene, track
from research.figures.style import COLOURS, canvas, label, legend_beside
from research.literature.h2o import HeavyHitters
from research.literature.kivi import Kivi
from research.literature.logquant import LogQuant
from research.literature.method import Eviction, LiteratureMethod
from research.literature.retained import attend_retained
from research.literature.retention import Retention, Table, sliding
from research.literature.streamingllm import SinksAndWindow
from vllm_antkv.offline.method import LayerWindow, Quantiser

#: W of LogQuant and the tokens that all policies keep exactly, at most.
WINDOW, TOKENS = 42, 126
BITS = 2


@dataclass(frozen=True)
class ByTable:
    """Drops what a retention table no longer keeps."""

    table: Table

    def visible(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        """See `Eviction.visible`."""
        return kept_by_table(self.table(key.shape[1]).to(key.device))

    def kept(self, num_tokens: int) -> int:
        """See `Eviction.kept`."""
        return int((self.table(num_tokens) >= num_tokens).sum())


def numbers(scene: Scene) -> dict[str, Any]:
    """Mean L1 error of an attention output over its mean L1 norm, over plain layers, heads and tokens of a window."""
    logquant = LogQuant(BITS, WINDOW)
    policies: dict[str, Table] = {
        "log-distributed tokens exact": logquant.last_query,
        "last tokens exact": sliding(TOKENS),
    }
    code = scene.method(scene.preset).quantiser
    assert code is not None
    layers = scene.plain_layers()
    methods: dict[str, dict[str, LiteratureMethod]] = {}
    for name, table in policies.items():
        coder: Quantiser = logquant if table == logquant.last_query else Kivi(BITS)
        methods[name] = {
            f"others at {BITS} bit (KIVI's quantiser)": _coding(scene, table, coder),
            f"others as {scene.preset}": _coding(scene, table, code),
            "others dropped": _dropping(scene, ByTable(table)),
        }
    methods["StreamingLLM"] = {"others dropped": _dropping(scene, SinksAndWindow(TOKENS))}
    methods["H2O"] = {"others dropped": _dropping(scene, HeavyHitters(TOKENS))}
    error = {name: dict.fromkeys(of_name, 0.0) for name, of_name in methods.items()}
    norm = 0.0
    for rows in track(layers, "eviction-error"):
        exact = rows.outputs()
        norm += float(exact.abs().mean())
        window = LayerWindow(
            rows.layer,
            rows.query[None],
            rows.key[None],
            rows.value[None],
            rows.rules,
            scene.rotaries[rows.layer],
        )
        for name, of_name in methods.items():
            for treatment, method in of_name.items():
                output = attend_retained(window, method, None)[0]
                error[name][treatment] += float((output - exact).abs().mean())
    return {
        "tokens": TOKENS,
        "relative_l1_error": {
            name: {treatment: value / norm for treatment, value in of_name.items()} for name, of_name in error.items()
        },
    }


def _coding(scene: Scene, table: Table, quantiser: Quantiser) -> LiteratureMethod:
    return LiteratureMethod("coded", BITS, scene.config(), quantiser, retention=Retention(table, table))


def _dropping(scene: Scene, eviction: Eviction) -> LiteratureMethod:
    return LiteratureMethod("dropped", 16.0, scene.config(), eviction=eviction)


def draw(numbers: dict[str, Any]) -> Canvas:
    """A group of bars for each policy."""
    figure, (panel,) = canvas(f"Coding or dropping all but {numbers['tokens']} tokens")
    errors = numbers["relative_l1_error"]
    treatments = list(next(iter(errors.values())))
    for index, treatment in enumerate(treatments):
        at = [place + 0.28 * (index - 1) for place, of_name in enumerate(errors.values()) if treatment in of_name]
        heights = [100 * of_name[treatment] for of_name in errors.values() if treatment in of_name]
        panel.bar_label(
            panel.bar(at, heights, width=0.28, color=COLOURS[index], label=treatment), fmt="%.1f", fontsize=7
        )
    panel.set_xticks(range(len(errors)), [name.replace(" tokens", "\ntokens") for name in errors])
    label(panel, "Attention outputs against full precision", "tokens kept exactly", "L1 error (% of the output)")
    legend_beside(figure, panel, 8.5)
    return figure
