"""`antkv eval retrieval`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Table

from vllm_antkv.cli.methods import load_methods
from vllm_antkv.cli.options import Json, MethodOptions, Model, grouped, names_in
from vllm_antkv.cli.tables import print_table, table
from vllm_antkv.errors import SettingsError
from vllm_antkv.progress import progress_bar

if TYPE_CHECKING:
    from vllm_antkv.evaluate.retrieval import RetrievalReport
    from vllm_antkv.evaluate.retrieval_prompts import RetrievalPrompt
    from vllm_antkv.offline.models import ModelCard

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class AnswererOptions:
    """Who is asked."""

    methods: Annotated[str | None, typer.Option(help="Names of methods, offline, separated by commas.")] = None
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Values of --kv-cache-dtype, through vLLM, separated by commas.")
    ] = None


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


@grouped
def retrieval(
    model: Model,
    json: Json,
    who: AnswererOptions,
    what: PromptOptions,
    cache: MethodOptions,
    figure: Annotated[Path | None, typer.Option(help="Heat maps of length and depth: a .png or .svg file.")] = None,
) -> None:
    """Exact match on synthetic retrieval prompts, at several lengths and depths.

    The JSON is written after every method.

    Example: `antkv eval retrieval MODEL --methods fp16,antkv-1bit --codebooks DIR --json OUT`

    Through vLLM, with the same prompts: `--kv-cache-dtype auto,antkv-1bit`
    """
    from vllm_antkv.evaluate.engine import check_kv_cache_dtypes
    from vllm_antkv.evaluate.heat_map import check_figure, write_heat_map
    from vllm_antkv.evaluate.report import check_writable, written_one_by_one
    from vllm_antkv.evaluate.retrieval_prompts import make_prompts
    from vllm_antkv.offline.models import ModelCard

    if not names_in(who.methods) and not names_in(who.kv_cache_dtype):
        raise SettingsError("Say what to evaluate, with --methods or --kv-cache-dtype.")
    check_writable(json)
    if figure is not None:
        check_figure(figure)
    card = ModelCard.read(model)
    sizes = _numbers("--lengths", what.lengths, int)
    card.check_context(max(sizes), "--lengths")
    asked = make_prompts(
        card.tokenizer, names_in(what.kinds), sizes, _numbers("--depths", what.depths, float), what.prompts, what.seed
    )
    check_kv_cache_dtypes(names_in(who.kv_cache_dtype))
    reports = written_one_by_one(_measured(card, who, cache, asked, max(sizes)), json)
    if figure is not None:
        write_heat_map(figure, reports)
    print_table(_table(reports))


def _measured(
    card: "ModelCard", who: AnswererOptions, cache: MethodOptions, asked: "list[RetrievalPrompt]", longest: int
) -> Iterator["RetrievalReport"]:
    from vllm_antkv.evaluate.retrieval import evaluate_retrieval
    from vllm_antkv.evaluate.served import evaluate_retrieval_served

    config = cache.config()
    if names := names_in(who.methods):
        loaded, built = load_methods(card, names, cache, longest)
        for method in built:
            with progress_bar(method.name, len(asked)) as progress:
                yield evaluate_retrieval(card, loaded, method, asked, progress.update)
    for dtype in names_in(who.kv_cache_dtype):
        with progress_bar(f"{dtype} served", len(asked)) as progress:
            yield evaluate_retrieval_served(card, dtype, config, asked, progress.update)


def _numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise SettingsError(f"{option} is '{text}', but must be {whole}numbers separated by commas.") from None


def _table(reports: "list[RetrievalReport]") -> Table:
    cells = [(cell.kind, cell.length, cell.depth) for cell in reports[0].cells]
    columns = list(dict.fromkeys((kind, length) for kind, length, _ in cells))
    depths = list(dict.fromkeys(depth for *_, depth in cells))
    made = table("method\nbits", "all", "depth", *(f"{kind}\n{length}" for kind, length in columns))
    for report in reports:
        match = {(cell.kind, cell.length, cell.depth): cell.exact_match for cell in report.cells}
        name = "\n".join([report.method, *["served"] * report.served, f"{report.effective_bits:.2f}"])
        for depth in depths:
            row = (f"{match[kind, length, depth]:.0%}" for kind, length in columns)
            first = depth == depths[0]
            about = (name, f"{report.exact_match:.1%}") if first else ("", "")
            made.add_row(*about, f"{depth:.0%}", *row, end_section=depth == depths[-1])
    return made
