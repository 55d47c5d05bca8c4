"""`antkv eval perplexity`."""

from typing import Annotated

import typer

from vllm_antkv.cli.methods import perplexities
from vllm_antkv.cli.options import Json, MethodOptions, Model, WindowOptions, grouped


@grouped
def perplexity(
    model: Model,
    method: Annotated[
        str, typer.Option(help="fp16, antkv-Xbit, cq-Xbit or one of docs/research/methods.md, e.g. rtn-2bit+pfn-5.")
    ],
    windows: WindowOptions,
    json: Json,
    cache: MethodOptions,
) -> None:
    """Perplexity of one method, offline.

    Example: `antkv eval perplexity MODEL --method antkv-1bit --codebooks DIR --text FILE --json OUT`

    As in the papers, without anything but anchors: `--recency none --prefix 0 --sinks 0`
    """
    from vllm_antkv.evaluate.report import write_json

    [report] = perplexities(model, [method], windows, json, cache)
    write_json(json, report.model_dump())
    print(f"{report.method}: perplexity {report.perplexity:.4f}, {report.effective_bits:.3f} effective bits")
