"""The answer of `GET /antkv/status`: the setup of the cache, and the engines' counters."""

from typing import Any, Literal, Self

import torch
import vllm
from pydantic import BaseModel, Field
from vllm.config import VllmConfig

from vllm_antkv import __version__
from vllm_antkv.cache.pages import pool_block_bytes
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.counters import ROW_CLASSES, Report
from vllm_antkv.presets import nominal_bits
from vllm_antkv.vllm_adapter.kv_transfer.savings import Store
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan

#: Pages of states are those of layers that do not attend.
PageClass = Literal["vq", "recency", "state"]
Part = Literal["codes", "anchors", "recency", "exact", "padding"]
RowClass = Literal["recent", "anchors", "codes"]


class Inactive(BaseModel, frozen=True):
    """The server runs with another cache dtype."""

    active: Literal[False] = False
    kv_cache_dtype: str


class Bits(BaseModel, frozen=True):
    """Bits per K or V element."""

    nominal: float = Field(description="Of the codes alone.")
    effective: float = Field(description="Of everything a sequence of `at_tokens` tokens takes from the pool.")
    parts: dict[Part, float] = Field(description="What the effective bits are made of.")
    at_tokens: int


class CodebookInfo(BaseModel, frozen=True):
    """The codebook that is served."""

    identity: str
    path: str
    bytes: int = Field(description="Of its centroids, in the file.")


class Page(BaseModel, frozen=True):
    """A class of pages."""

    block_size: int = Field(description="Tokens per page.")
    bytes: int = Field(description="Per KV head, all layers.")


class Setup(BaseModel, frozen=True):
    """How the cache is set up: the same for as long as the server runs."""

    active: Literal[True] = True
    preset: str
    layers: tuple[str, ...] = Field(description="The preset of every layer that has codes, in their order.")
    bits: Bits
    kv_bytes_per_token: dict[Part, float] = Field(description="Of all layers and KV heads, at `bits.at_tokens`.")
    settings: AntKVConfig
    codebook: CodebookInfo
    pages: dict[PageClass, Page]
    pool_page_bytes: int = Field(description="Of a page of either class, all layers and KV heads.")
    bf16_bytes_per_token: int = Field(description="What a BF16 cache would take, at `bits.at_tokens`.")
    versions: dict[str, str]

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        """Read it from the configuration of a server with an antkv cache."""
        plan, model_config = engine_plan(vllm_config), vllm_config.model_config
        cost, layouts, codebook = plan.footprint, plan.layouts, plan.codebook
        parts: dict[Part, int] = {
            "codes": cost.codes,
            "anchors": cost.anchors,
            "recency": cost.recency,
            "padding": cost.padding,
        }
        if cost.exact:
            parts["exact"] = cost.exact
        heads = model_config.get_total_num_kv_heads()
        return cls(
            preset=vllm_config.cache_config.cache_dtype,
            layers=plan.layers,
            bits=Bits(
                nominal=nominal_bits(plan.presets),
                effective=cost.bits(cost.total),
                parts={part: cost.bits(num_bytes) for part, num_bytes in parts.items()},
                at_tokens=cost.length,
            ),
            kv_bytes_per_token={part: heads * num_bytes / cost.length for part, num_bytes in parts.items()},
            settings=plan.settings,
            codebook=CodebookInfo(identity=codebook.identity, path=codebook.path, bytes=codebook.num_bytes),
            pages={
                "vq": Page(
                    block_size=plan.blocks.num_tokens,
                    bytes=plan.blocks.num_pages * sum(layout.vq_page_bytes for layout in layouts),
                ),
                "recency": Page(
                    block_size=layouts[0].recency_block_size, bytes=sum(layout.recency_page_bytes for layout in layouts)
                ),
            },
            pool_page_bytes=heads * pool_block_bytes(layouts, plan.blocks.num_exact, plan.position_bytes),
            # A BF16 cache would free tokens past a window, too.
            bf16_bytes_per_token=heads * 2 * cost.elements // cost.length,
            versions={"vllm_antkv": __version__, "vllm": vllm.__version__, "torch": torch.__version__},
        )


class Operation(BaseModel, frozen=True):
    """Work of one operation since the start, in all layers."""

    calls: int
    seconds: float


class EngineStatus(BaseModel, frozen=True):
    """What one engine has done since its start."""

    engine: int
    pool_pages: int = Field(description="Pages in the pool, used by either class.")
    pages_in_use: dict[PageClass, int] = Field(description="Held by requests now; the prefix cache's are free.")
    tokens_in_use: int = Field(description="Tokens that requests hold now; shared ones count once.")
    tokens_stored: int = Field(description="Tokens written to the cache, recomputed ones included.")
    anchors_chosen: float = Field(description="Tokens kept as an anchor, the mean over KV heads, K and V.")
    sinks_found: int = Field(description="Tokens that KVSink flagged.")
    sampled_attention: dict[RowClass, float] = Field(description="Sampled queries, by where their attention went.")
    implementation: str = Field(description="Kernels that run, with + between them.")
    fallbacks: int | None = Field(
        description="Attention calls that the implementation did not serve; not 0 is a bug. Null on a GPU."
    )
    operations: dict[str, Operation] = Field(
        description="None contains the time of another. Empty on a GPU, where CUDA graphs run without calls."
    )
    store: Store | None = Field(description="Null without pages in a folder.")

    @classmethod
    def of(cls, engine: int, answer: dict[str, Any]) -> Self:
        """Read the answer of the engine core's `antkv_status`.

        Tensor-parallel workers process the same tokens on different heads. Tokens and sinks are the first worker's,
        anchors and attention the mean, times the slowest worker's. Every layer attends once per step, so a missing call
        is a fallback.
        """
        workers: list[Report] = answer["workers"]
        first = workers[0]
        return cls(
            engine=engine,
            pool_pages=answer["pool_pages"],
            pages_in_use=answer["pages_in_use"],
            tokens_in_use=answer["tokens_in_use"],
            tokens_stored=first["tokens_stored"],
            anchors_chosen=sum(worker["anchors_chosen"] for worker in workers) / len(workers),
            sinks_found=first["sinks_found"],
            sampled_attention={
                row_class: sum(worker["sampled_attention"][row_class] for worker in workers) / len(workers)
                for row_class in ROW_CLASSES
            },
            implementation=first["implementation"],
            fallbacks=first["steps"] * answer["num_layers"] - first["operations"]["attend"]["calls"]
            if first["operations"]
            else None,
            operations={
                name: Operation(
                    calls=operation["calls"], seconds=max(worker["operations"][name]["seconds"] for worker in workers)
                )
                for name, operation in first["operations"].items()
            },
            store=answer["store"] and Store(**answer["store"]),
        )


class Status(Setup):
    """The server runs with an antkv cache."""

    engines: list[EngineStatus]
