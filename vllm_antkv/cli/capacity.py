"""`antkv capacity`."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_antkv.cli.options import DEFAULTS, Anchors, Model, Prefix, RecentTokens
from vllm_antkv.config import AntKVConfig


def capacity(
    model: Model,
    memory: Annotated[list[float], typer.Option(min=1, help="Memory of a GPU in GB; repeatable.")],
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 8192,
    anchors: Anchors = DEFAULTS.anchor_share,
    prefix: Prefix = DEFAULTS.prefix,
    recency: RecentTokens = DEFAULTS.recency,
) -> None:
    """How many tokens a GPU's cache holds with each preset, computed from the model's sizes.

    Example: `antkv capacity MODEL --memory 24 --memory 80`
    """
    from vllm_antkv.evaluate.capacity import capacities
    from vllm_antkv.offline.models import ModelCard

    config = AntKVConfig(anchor_share=anchors, prefix=prefix, recency=recency)
    table = Table("kv-cache-dtype", "bits", "codebooks", *(f"{size:g} GB" for size in memory))
    for found in capacities(ModelCard.read(model), config, context, memory):
        sizes = (f"{tokens:,}" if tokens else "does not fit" for tokens in found.tokens)
        table.add_row(found.kv_cache_dtype, f"{found.bits:.3f}", f"{found.codebook_bytes / 1e6:,.0f} MB", *sizes)
    Console().print(table)
    print(f"Tokens of sequences of {context}; computed, with 2 GB for all that is neither weights nor cache.")
