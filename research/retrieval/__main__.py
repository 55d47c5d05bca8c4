"""Exact match on synthetic retrieval prompts, at several lengths and depths.

python -m research.retrieval MODEL --methods fp16,antkv-1bit --codebooks DIR --json OUT
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from research.literature.__main__ import LiteratureOptions, method_loader
from research.retrieval.answers import RetrievalReport, evaluate_retrieval
from research.retrieval.prompts import make_prompts
from vllm_antkv import cli
from vllm_antkv.cli.options import Json, Model, grouped, names_in
from vllm_antkv.cli.tables import print_table, table
from vllm_antkv.errors import SettingsError
from vllm_antkv.evaluate.report import check_writable, written_one_by_one
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.progress import progress_bar

Number = TypeVar("Number", int, float)

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)


@dataclass(frozen=True)
class PromptOptions:
    """What is asked."""

    kinds: Annotated[
        str,
        typer.Option(
            help="pairs: one of many key:value lines; passkey: a number in a text; chat: the same as a message in the "
            "model's chat format."
        ),
    ] = "pairs,passkey"
    lengths: Annotated[str, typer.Option(help="Tokens of prompt and answer, separated by commas.")] = "512,1024,2048"
    depths: Annotated[str, typer.Option(help="Where the answer is: 0 first line, 1 last.")] = "0,0.25,0.5,0.75,1"
    prompts: Annotated[int, typer.Option(min=1, help="For every kind, length and depth.")] = 20
    seed: Annotated[int, typer.Option(help="The same seed gives the same prompts.")] = 0


@app.command()
@grouped
def retrieval(
    model: Model,
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas (docs/research/methods.md).")],
    json: Json,
    what: PromptOptions,
    cache: LiteratureOptions,
) -> None:
    """Exact match, by method, kind, length and depth. The JSON is written after every method."""
    load = method_loader(names_in(methods), cache)
    check_writable(json)
    card = ModelCard.read(model)
    sizes = _numbers("--lengths", what.lengths, int)
    card.check_context(max(sizes), "--lengths")
    asked = make_prompts(
        card.tokenizer, names_in(what.kinds), sizes, _numbers("--depths", what.depths, float), what.prompts, what.seed
    )
    loaded, built = load(card, max(sizes))

    def measured() -> Iterator[RetrievalReport]:
        for method in built:
            with progress_bar(method.name, len(asked)) as progress:
                yield evaluate_retrieval(card, loaded, method, asked, progress.update)

    print_table(_table(written_one_by_one(measured(), json)))


def _numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise SettingsError(f"{option} is '{text}', but must be {whole}numbers separated by commas.") from None


def _table(reports: list[RetrievalReport]) -> Table:
    cells = [(cell.kind, cell.length, cell.depth) for cell in reports[0].cells]
    columns = list(dict.fromkeys((kind, length) for kind, length, _ in cells))
    depths = list(dict.fromkeys(depth for *_, depth in cells))
    made = table("method\nbits", "all", "depth", *(f"{kind}\n{length}" for kind, length in columns))
    for report in reports:
        match = {(cell.kind, cell.length, cell.depth): cell.exact_match for cell in report.cells}
        name = f"{report.method}\n{report.effective_bits:.2f}"
        for depth in depths:
            row = (f"{match[kind, length, depth]:.0%}" for kind, length in columns)
            first = depth == depths[0]
            about = (name, f"{report.exact_match:.1%}") if first else ("", "")
            made.add_row(*about, f"{depth:.0%}", *row, end_section=depth == depths[-1])
    return made


def run(args: list[str]) -> int:
    """Run one command line and return its exit code."""
    return cli.run(args, app, "python -m research.retrieval")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
