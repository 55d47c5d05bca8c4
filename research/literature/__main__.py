"""Compare methods of the literature with ours.

python -m research.literature MODEL --methods fp16,kivi-2bit,antkv-1bit --text FILE --json OUT
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from research.literature import tasq
from research.literature.method import check_eviction
from research.literature.registry import build_method, check_method
from research.literature.request import AnchorScope, LiteratureRequest
from research.literature.sample import MAX_TOKENS, take_sample
from vllm_antkv import cli
from vllm_antkv.cli.compare import show_comparison
from vllm_antkv.cli.methods import Loader, perplexities
from vllm_antkv.cli.options import DEFAULTS, CacheOptions, Json, Model, WindowOptions, grouped, parse_recency
from vllm_antkv.evaluate.windows import load_windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vllm_antkv.offline.method import Method
    from vllm_antkv.offline.models import ModelCard

#: The value of --recency that lets every method keep what its own paper keeps.
OWN = "own"

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)


@dataclass(frozen=True)
class LiteratureOptions(CacheOptions):
    """What is kept, and what is learned from."""

    recency: Annotated[
        str,
        typer.Option(
            "--recency",
            parser=lambda text: text if text == OWN else parse_recency(text),
            metavar="sliding:W|log:W|none|own",
            help="Recent tokens that stay unquantised, for every method. own: the recent and first tokens of each "
            "method's paper, and the server's default for cq-* and antkv-*.",
        ),
    ] = DEFAULTS.recency
    anchor_scope: Annotated[
        AnchorScope,
        typer.Option(help="Queries that count in Anchor Scores: those of the block, or all of the window (paper)."),
    ] = "block"
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Text that kvquant-*, skvq-*, tasq-* and +kvsink-N learn from. Default: the first tokens of each "
            "window, and for kvsink a codebook's sink rule; tasq-* needs a text."
        ),
    ] = None
    calibration_tokens: Annotated[int, typer.Option(min=1, help="Of that text, tokens learned from.")] = MAX_TOKENS

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), **({"recency": DEFAULTS.recency} if self.recency == OWN else {})}


def method_loader(names: list[str], cache: LiteratureOptions) -> Loader:
    """Builds these methods; refuses at once names and settings that cannot be used."""
    config = cache.config()
    names = [check_method(name.strip()) for name in names]

    def load(card: "ModelCard", context: int) -> "tuple[PreTrainedModel, list[Method]]":
        sample = loaded = None
        if cache.calibration is not None:
            learned = load_windows(cache.calibration, card.tokenizer, context)
            card.check_windows(learned)
            loaded = card.load()
            minded = any(name.split("+")[0] in tasq.NAMES for name in names)
            sample = take_sample(loaded, learned, str(cache.calibration), cache.calibration_tokens, minded)
        request = LiteratureRequest(
            card.name, card.identity, cache.codebooks, config, cache.anchor_scope, cache.recency == OWN, sample
        )
        built = [build_method(name, request) for name in names]
        loaded = loaded or card.load()
        for method in built:
            check_eviction(loaded, method, context)
        return loaded, built

    return load


@app.command()
@grouped
def compare(
    model: Model,
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas (docs/research/methods.md).")],
    windows: WindowOptions,
    json: Json,
    cache: LiteratureOptions,
) -> None:
    """Perplexity side by side, how much of CQ's loss antkv-* closes, and how far each is from fp16.

    Example: `python -m research.literature MODEL --methods fp16,kivi-2bit,kvquant-2bit+pfn-5 --text FILE --json OUT`
    """
    load = method_loader(methods.split(","), cache)
    show_comparison(perplexities(model, windows, json, load, against_own=True), json)


def run(args: list[str]) -> int:
    """Run one command line and return its exit code."""
    return cli.run(args, app, "python -m research.literature")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
