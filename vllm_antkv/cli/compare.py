"""`antkv eval compare`."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vllm_antkv.cli.methods import method_loader, perplexities
from vllm_antkv.cli.options import CacheOptions, Json, Model, WindowOptions, grouped
from vllm_antkv.cli.tables import print_table, table

if TYPE_CHECKING:
    from vllm_antkv.evaluate.report import PerplexityReport


@grouped
def compare(
    model: Model,
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas.")],
    windows: WindowOptions,
    json: Json,
    cache: CacheOptions,
) -> None:
    """Perplexity of several methods side by side, how much of CQ's loss antkv-* closes, and how far each is from fp16.

    Example: `antkv eval compare MODEL --methods fp16,cq-1bit,antkv-1bit --codebooks DIR --text FILE --json OUT`

    `--recency` and `--context` apply to every method; the gap needs fp16 and the cq-* of the same bits in the list.
    The JSON is written after every method.
    """
    load = method_loader(methods.split(","), cache)
    show_comparison(perplexities(model, windows, json, load, against_own=True), json)


def show_comparison(measured: "Iterable[PerplexityReport]", json: Path) -> None:
    """Write the JSON after every method, and print the table at the end."""
    from vllm_antkv.evaluate.report import gap_closed, write_json

    reports: list[PerplexityReport] = []
    for report in measured:
        reports.append(report)
        closed = gap_closed(reports)
        fidelity = {each.method: each.fidelity.model_dump() for each in reports if each.fidelity}
        write_json(
            json, {"results": [each.model_dump() for each in reports], "gap_closed": closed, "fidelity": fidelity}
        )
    print_table(_table(reports, closed))


def _table(reports: "list[PerplexityReport]", closed: dict[str, float]) -> Table:
    titles = ("perplexity", "nominal\nbits", "effective\nbits", "gap\nclosed", "KL from\nfp16", "top-1")
    made = table("method", *titles)
    for report in reports:
        gap, fidelity = closed.get(report.method), report.fidelity
        assert fidelity is not None
        made.add_row(
            report.method,
            f"{report.perplexity:.4f}",
            f"{report.nominal_bits:g}",
            f"{report.effective_bits:.3f}",
            "" if gap is None else f"{gap:.1%}",
            f"{fidelity.kl:.5f}",
            f"{fidelity.top1_agreement:.2%}",
        )
    return made
