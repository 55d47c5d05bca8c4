"""`antkv eval perplexity`."""

from typing import Annotated

import typer

from vllm_antkv.cli.methods import method_loader, perplexities
from vllm_antkv.cli.options import CacheOptions, Json, Model, WindowOptions, grouped


@grouped
def perplexity(
    model: Model,
    method: Annotated[str, typer.Option(help="fp16, antkv-Xbit, or cq-Xbit: plain k-means centroids.")],
    windows: WindowOptions,
    json: Json,
    cache: CacheOptions,
) -> None:
    """Perplexity of one method, offline.

    Example: `antkv eval perplexity MODEL --method antkv-1bit --codebooks DIR --text FILE --json OUT`

    As in the papers, without anything but anchors: `--recency none --prefix 0 --sinks 0`
    """
    from vllm_antkv.evaluate.report import write_json

    [report] = perplexities(model, windows, json, method_loader([method], cache))
    write_json(json, report.model_dump())
    print(f"{report.method}: perplexity {report.perplexity:.4f}, {report.effective_bits:.3f} effective bits")
