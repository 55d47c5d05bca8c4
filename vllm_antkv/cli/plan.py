"""`antkv plan`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_antkv.capacity.gpus import GPUS
from vllm_antkv.cli.options import DEFAULTS, Anchors, AnchorsAs, Model, Prefix, RecentTokens, grouped
from vllm_antkv.cli.tables import JsonInstead, deliver, print_table, table, wrapped
from vllm_antkv.config import AntKVConfig

if TYPE_CHECKING:
    from vllm_antkv.capacity.plan import CachePlan, Plan


@dataclass(frozen=True)
class LoadOptions:
    """What is asked of the GPUs."""

    context: Annotated[int, typer.Option(min=1, help="Tokens of a request, prompt and answer.")] = 8192
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 64
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs over which the model is cut.")] = 1


@dataclass(frozen=True)
class KeptOptions:
    """What an antkv cache keeps unquantised."""

    anchors: Anchors = DEFAULTS.anchor_share
    anchor_dtype: AnchorsAs = DEFAULTS.anchor_dtype
    prefix: Prefix = DEFAULTS.prefix
    recency: RecentTokens = DEFAULTS.recency


@grouped
def plan(
    model: Model,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.", autocompletion=lambda: list(GPUS))],
    load: LoadOptions = LoadOptions(),
    json: JsonInstead = None,
    kept: KeptOptions = KeptOptions(),
) -> None:
    """What each cache holds and reads on a GPU, and which to take, from the model's config alone.

    Example: `antkv plan MODEL --gpu h100-80 --context 32768 --batch 64`

    Nothing is measured, and no weights are read.
    """
    from vllm_antkv.capacity.plan import make_plan

    settings = AntKVConfig(
        anchor_share=kept.anchors, anchor_dtype=kept.anchor_dtype, prefix=kept.prefix, recency=kept.recency
    )
    made = make_plan(model, gpu, load.context, load.batch, settings, load.tensor_parallel_size)
    deliver(made.model_dump(), json, lambda: _show(made))


def _show(plan: "Plan") -> None:
    gpus = plan.gpu if plan.tensor_parallel_size == 1 else f"{plan.tensor_parallel_size} x {plan.gpu}"
    print(f"{plan.model}: {plan.batch:,} requests of {plan.context:,} tokens on {gpus}, in a step as many as fit\n")
    titles = ("bits", "tokens", "requests\nat once", "GB\na step", "ms\na step")
    shown = table("cache", "kernels", *titles, "tokens/s\nat most")
    for cache in plan.caches:
        mark = "*" if cache.kv_cache_dtype == plan.recommended else ""
        shown.add_row(
            f"{cache.kv_cache_dtype}{mark}",
            cache.kernels or "",
            f"{cache.bits:.3f}",
            f"{cache.tokens:,}",
            *_of_step(cache),
        )
    print_table(shown)
    each, talk = ("", "") if plan.tensor_parallel_size == 1 else (" on each GPU", ", all-reduces")
    notes = [
        plan.reason,
        f"Computed from sizes: weights of {plan.weight_bytes / 1e9:.1f} GB{each} in 16 bits, 92% of the memory, 2 GB "
        "for all that is neither weights nor cache. Times are bounds; sampling, launches"
        f"{talk} and the scheduler come on top.",
    ]
    if plan.state_bytes:
        notes.append(
            f"Layers that keep a state take {plan.state_bytes / 1e6:,.1f} MB of a request in every cache. Codes make "
            "the rest smaller: the longer the requests, the more a preset gains."
        )
    if plan.seen < plan.context:
        notes.append(
            f"Layers with sliding windows hold no more than those: {plan.seen:,.0f} of {plan.context:,} tokens, the "
            "mean of all layers. A request whose prompt is being read holds the tokens of the step beside them, which "
            "the figure that vLLM prints when it starts counts for all requests."
        )
    for note in notes:
        print(f"\n{wrapped(note)}")


def _of_step(cache: "CachePlan") -> list[str]:
    if cache.step is None:
        return ["0"]
    step = cache.step
    figures = (f"{step.read_bytes / 1e9:.1f}", f"{step.seconds * 1e3:.1f}")
    return [f"{cache.requests:,}", *figures, f"{step.tokens_per_second:,.0f}"]
