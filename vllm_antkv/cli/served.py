"""`antkv eval served`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from vllm_antkv.cli.options import CacheOptions, Json, Model, WindowOptions, grouped
from vllm_antkv.offline.adapters import Adapter
from vllm_antkv.progress import progress_bar


@dataclass(frozen=True)
class EngineOptions:
    """What vLLM is told."""

    kv_cache_dtype: Annotated[str, typer.Option(help="A preset, or auto.")]
    against: Annotated[
        str | None,
        typer.Option(
            help="Another --kv-cache-dtype, as a rule auto: a second engine serves it, and top-1 agreement and KL "
            "divergence are reported."
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of weights and activations; default: the checkpoint's."),
    ] = None
    lora: Annotated[
        Adapter | None,
        typer.Option(parser=Adapter.parse, metavar="NAME=PATH", help="A LoRA adapter that every request uses."),
    ] = None


@grouped
def served(model: Model, engine: EngineOptions, given: WindowOptions, json: Json, cache: CacheOptions) -> None:
    """Perplexity through real vLLM, to be held against the offline figure for the same settings.

    Example: `antkv eval served MODEL --kv-cache-dtype antkv-1bit --codebooks DIR --text FILE --json OUT`

    The divergence is over the 20 most likely tokens of both and a rest: a lower bound of that over the vocabulary.
    """
    from vllm_antkv.evaluate.engine import check_kv_cache_dtypes
    from vllm_antkv.evaluate.report import check_writable, write_json
    from vllm_antkv.evaluate.served import evaluate_served
    from vllm_antkv.evaluate.windows import TextWindows, load_windows
    from vllm_antkv.offline.models import ModelCard

    check_writable(json)
    config = cache.config()
    card = ModelCard.read(model, engine.dtype, engine.lora)
    ids = load_windows(given.text, card.tokenizer, given.context, given.max_windows)
    windows = TextWindows(given.text, ids)
    dtypes = [engine.kv_cache_dtype, *([] if engine.against is None else [engine.against])]
    check_kv_cache_dtypes(dtypes)
    with progress_bar(", ".join(dtypes), len(dtypes) * len(ids)) as progress:
        report = evaluate_served(card, engine.kv_cache_dtype, config, windows, progress.update, engine.against)
    write_json(json, report.model_dump())
    print(f"{report.method} served: perplexity {report.perplexity:.4f}, {report.effective_bits:.3f} effective bits")
    if report.against is not None:
        print(
            f"against {report.against.kv_cache_dtype} with perplexity {report.against.perplexity:.4f}: "
            f"{report.against.top1_agreement:.2%} top-1 agreement, KL {report.against.kl:.5f} nats"
        )
