"""What anchors gain that are chosen in different ways, at the same count, against an oracle.

    python -m research.anchor_choice MODEL --text FILE --codebooks DIR --out DIR

takes the arguments of `python -m research.figures` and writes one more figure, `anchor-choice`.

The oracle knows what no server can: by how much each row's code will change the attention outputs of the queries that
see it (`row_error`). Choices are made from a full-precision run of the same window, so that they all see the same rows.
Anchors then serve every query that would see the code; with a recency these are the queries past the block's end, as
in the engine.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas

from research.figures import FIGURES, __main__
from research.figures.activations import LayerRows
from research.figures.equation_5 import equation_5
from research.figures.row_error import RowScores, row_errors
from research.figures.scene import Scene, track
from research.figures.style import INK, canvas, label, legend_beside, lines
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.evaluate.report import perplexity_of
from vllm_antkv.offline.method import Method, Quantiser
from vllm_antkv.offline.prompt_scores import POWER, vote_weights
from vllm_antkv.offline.score import Scores, score
from vllm_antkv.ops.reference import anchor_score, causal_lse
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.select.anchors import anchor_slots, block_anchors, code_errors, top_rows
from vllm_antkv.select.recency import last_query_table

SHARES = (0.01, 0.02, 0.05, 0.10)
ORACLE = "oracle: true output error"
SERVED = "Anchor Score times code error, own block's queries (served)"


@dataclass(frozen=True)
class Candidates:
    """One layer of one window, from which anchors are chosen.

    coded_key, coded_value: (num_tokens, num_kv_heads, head_size), what the rows come back as.
    seen: (num_tokens, num_tokens) bool, True where query i sees row j through its code.
    """

    rows: LayerRows
    coded_key: torch.Tensor
    coded_value: torch.Tensor
    seen: torch.Tensor


#: K and V rows to keep, each (num_tokens, num_kv_heads) bool.
Chosen = tuple[torch.Tensor, torch.Tensor]


def served_scores(rows: LayerRows, config: AntKVConfig, scope: str) -> RowScores:
    """The engine's Anchor Score of every row, from full-precision attention.

    Args:
        rows: the layer.
        config: says what is seen exactly.
        scope: queries that vote: `prompt`, all of the window, or `block`, those of the row's own VQ block.
    """
    num_tokens, device = len(rows.key), rows.key.device
    positions = torch.arange(num_tokens, device=device)
    last_query = last_query_table(config, num_tokens, rows.rules.window).to(device)
    votes, power = rows.visible, POWER
    weight = vote_weights(positions[:, None], positions, last_query, rows.rules.window)
    if scope == "block":
        votes, power = votes & (positions // VQ_BLOCK_SIZE == positions[:, None] // VQ_BLOCK_SIZE), 1
        weight = votes.float()
    scores = []
    for head in range(rows.key.shape[1]):
        query, key, rules = rows.group(head)
        lse = causal_lse(query, key, votes[None], rules)
        scores.append(torch.cat(anchor_score(query, key, lse, weight[None], rules, power)))
    of_key, of_value = torch.cat(scores, dim=1)
    return RowScores(of_key, of_value)


def seen_through_code(config: AntKVConfig, rows: LayerRows) -> torch.Tensor:
    """(num_tokens, num_tokens) bool, True where query i sees row j, but no longer exactly."""
    num_tokens, device = len(rows.key), rows.key.device
    last = last_query_table(config, num_tokens, rows.rules.window).to(device)
    return rows.visible & (torch.arange(num_tokens, device=device)[:, None] > last)


#: Chooses the rows of one layer under each of several settings, which differ in the number of rows.
Choice = Callable[[Candidates, Sequence[AntKVConfig]], list[Chosen]]


def _by_anchor_score(scope: str) -> Choice:
    """The engine's own choice, with the votes of either scope."""

    def choose(candidates: Candidates, configs: Sequence[AntKVConfig]) -> list[Chosen]:
        rows, scores = candidates.rows, served_scores(candidates.rows, configs[0], scope)

        def kept(config: AntKVConfig, score: torch.Tensor, exact: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
            def of_block(block: slice) -> torch.Tensor:
                already = torch.arange(block.start, block.stop, device=exact.device) < config.prefix
                window, errors = rows.rules.window, code_errors(exact[block], coded[block])
                if scope == "block":
                    return block_anchors(score[:, block], errors, already, config, window)
                no_sinks = torch.zeros_like(errors, dtype=torch.bool)
                return anchor_slots(score[:, block] * errors**POWER, no_sinks, already, config)

            return _in_blocks(of_block, score)

        return [
            (
                kept(config, scores.key, rows.key, candidates.coded_key),
                kept(config, scores.value, rows.value, candidates.coded_value),
            )
            for config in configs
        ]

    return choose


def _by(rank: Callable[[Candidates], RowScores]) -> Choice:
    """The rows of each block that rank highest."""

    def choose(candidates: Candidates, configs: Sequence[AntKVConfig]) -> list[Chosen]:
        ranks = rank(candidates)
        return [(best_of_blocks(ranks.key, config), best_of_blocks(ranks.value, config)) for config in configs]

    return choose


def best_of_blocks(scores: torch.Tensor, config: AntKVConfig) -> torch.Tensor:
    """The highest of each block that closes before the window ends, beside the intact prefix.

    Args:
        scores: (num_kv_heads, num_tokens).
        config: says how many rows.

    Returns:
        (num_tokens, num_kv_heads) bool.
    """
    scores = scores.clone()
    scores[:, : config.prefix] = -torch.inf
    return _in_blocks(lambda block: top_rows(scores[:, block], config.anchor_rows), scores)


def _in_blocks(of_block: Callable[[slice], torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros_like(scores, dtype=torch.bool)
    offsets = torch.arange(VQ_BLOCK_SIZE, device=scores.device)
    for start in range(0, scores.shape[1] - VQ_BLOCK_SIZE, VQ_BLOCK_SIZE):
        block = slice(start, start + VQ_BLOCK_SIZE)
        kept[:, block] = (of_block(block)[..., None] == offsets).any(-2)
    return kept.T


def _oracle(candidates: Candidates) -> RowScores:
    return row_errors(candidates.rows, candidates.coded_key, candidates.coded_value, candidates.seen)


def _attention_sum(candidates: Candidates) -> RowScores:
    mass = equation_5(candidates.rows).value
    return RowScores(mass, mass)


def _random(candidates: Candidates) -> RowScores:
    generator = torch.Generator().manual_seed(candidates.rows.layer)
    num_tokens, num_kv_heads, _ = candidates.rows.key.shape
    return RowScores(*torch.rand(2, num_kv_heads, num_tokens, generator=generator).to(candidates.rows.key.device))


def _latest(candidates: Candidates) -> RowScores:
    num_tokens, num_kv_heads, _ = candidates.rows.key.shape
    position = torch.arange(num_tokens, device=candidates.rows.key.device).float().expand(num_kv_heads, -1)
    return RowScores(position, position)


CHOICES: dict[str, Choice] = {
    ORACLE: _by(_oracle),
    "Anchor Score times code error, all queries": _by_anchor_score("prompt"),
    SERVED: _by_anchor_score("block"),
    "Anchor Score alone, all queries (AnTKV, eq. 5)": _by(lambda candidates: equation_5(candidates.rows)),
    "attention received, all queries": _by(_attention_sum),
    "last of the block": _by(_latest),
    "random": _by(_random),
}


@dataclass(frozen=True)
class _WithRows:
    """A quantiser that leaves chosen rows of one window as they are."""

    base: Quantiser
    chosen: list[Chosen]

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        of_key, of_value = self.chosen[layer]
        coded_key, coded_value = self.base.read_back(layer, key, value, rotary)
        return torch.where(of_key[..., None], key, coded_key), torch.where(of_value[..., None], value, coded_value)


def numbers(scene: Scene) -> dict[str, Any]:
    """Perplexity and divergence for each choice and share, and what share of the oracle's gain that is, in either."""
    bare = scene.method(scene.preset, anchor_share=0.0, sinks=False)
    configs = [scene.config(anchor_share=share, anchor_dtype="fp8", sinks=False) for share in SHARES]
    scores: dict[str, list[list[Scores]]] = {name: [[] for _ in SHARES] for name in CHOICES}
    steps = [(window, name) for window in range(len(scene.windows)) for name in CHOICES]
    layers: list[Candidates] = []
    for window, name in track(steps, "anchor-choice"):
        if name == ORACLE:
            layers = _candidates(scene, bare, window)
        chosen = zip(*(CHOICES[name](candidates, configs) for candidates in layers), strict=True)
        for of_share, of_layers in zip(scores[name], chosen, strict=True):
            assert bare.quantiser is not None
            method = replace(bare, quantiser=_WithRows(bare.quantiser, list(of_layers)))
            of_share.append(score(scene.model, method, scene.windows[window : window + 1], against_own=True))
    without = score(scene.model, bare, scene.windows, against_own=True)
    nothing = perplexity_of(without.nll)
    perplexity = {
        name: [perplexity_of(fmean(found.nll for found in of_share)) for of_share in of_name]
        for name, of_name in scores.items()
    }
    divergence = {name: [fmean(map(_kl, of_share)) for of_share in of_name] for name, of_name in scores.items()}
    return {
        "preset": scene.preset,
        "shares": SHARES,
        "rows_per_block": [config.anchor_rows for config in configs],
        "fp16": scene.full_perplexity,
        "no_anchors": nothing,
        "no_anchors_divergence": _kl(without),
        "perplexity": perplexity,
        "divergence": divergence,
        "share_of_oracle_gain": _shares_of_oracle(nothing, perplexity),
        "share_of_oracle_gain_in_divergence": _shares_of_oracle(_kl(without), divergence),
    }


def _kl(found: Scores) -> float:
    assert found.fidelity is not None
    return found.fidelity.kl


def _shares_of_oracle(without: float, lost: dict[str, list[float]]) -> dict[str, list[float | None]]:
    gains = {name: [without - value for value in values] for name, values in lost.items()}
    return {
        name: [gain / best if best > 0 else None for gain, best in zip(of_name, gains[ORACLE], strict=True)]
        for name, of_name in gains.items()
    }


def _candidates(scene: Scene, method: Method, window: int) -> list[Candidates]:
    layers: list[Candidates] = []

    def visit(rows: LayerRows) -> None:
        layers.append(Candidates(rows, *scene.coded(method, rows), seen_through_code(method.config, rows)))

    scene.visit(visit, window)
    return layers


def draw(numbers: dict[str, Any]) -> Canvas:
    """Perplexity and divergence against the share of anchors, one line for each choice."""
    figure, (perplexity, divergence) = canvas(f"Who chooses the anchors ({numbers['preset']})", 2)
    shares = [100 * share for share in numbers["shares"]]
    lines(perplexity, shares, numbers["perplexity"])
    perplexity.axhline(numbers["no_anchors"], color=INK, linestyle=":", label="no anchors")
    perplexity.axhline(numbers["fp16"], color=INK, linestyle="--", label="full precision")
    lines(divergence, shares, numbers["divergence"])
    divergence.axhline(numbers["no_anchors_divergence"], color=INK, linestyle=":")
    label(perplexity, "All choices keep the same number of rows", "anchors (% of tokens)", "perplexity")
    label(divergence, "0: as in full precision", "anchors (% of tokens)", "KL divergence (nats)", legend=False)
    legend_beside(figure, perplexity, 14)
    return figure


if __name__ == "__main__":
    FIGURES["anchor-choice"] = sys.modules[__name__]
    sys.exit(__main__.run([*sys.argv[1:], "--figures", "anchor-choice"]))
