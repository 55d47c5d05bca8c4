"""One antkv attention layer of a Llama-3-8B, its pages full of random codes and rows."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.llama import HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, ROPE_THETA, SCALE
from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import PageLayout, RecencyPages, VQPages, pool_block_bytes
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.fp8_tables import served
from vllm_antkv.ops.layer import LayerSetup, LayerState
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.reference import correction
from vllm_antkv.ops.rope import RotaryTable, interleaved, reordered
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.presets import get_preset
from vllm_antkv.select.recency import last_query_table
from vllm_antkv.select.retention import page_retention

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Tokens:
    """What a step hands to a layer.

    rows: without sinks.
    output: (num_tokens, NUM_HEADS, HEAD_SIZE).
    """

    rows: StepRows
    output: torch.Tensor

    @classmethod
    def random(cls, num_tokens: int, device: str = "cuda") -> "Tokens":
        """Rows drawn at random; the output is NaN until it is written."""
        query = torch.randn(num_tokens, NUM_HEADS, HEAD_SIZE, dtype=DTYPE, device=device)
        key, value = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_SIZE, dtype=DTYPE, device=device)
        return cls(StepRows(query, key, value, None), torch.full_like(query, torch.nan))


class Requests:
    """Requests of so many tokens each that share no page, in the state that they have before the last `new`.

    state: for the operations, with all that a codebook has as calibration makes it.
    step: computes the last `new` tokens of every request.
    kv_bytes: of the cache, that attention of one new token per request has to read.
    """

    def __init__(
        self, preset: str, lengths: list[int], new: int, config: AntKVConfig | None = None, device: str = "cuda"
    ) -> None:
        batch, length = len(lengths), max(lengths)
        config = AntKVConfig() if config is None else config
        layout = PageLayout.of(config, get_preset(preset), HEAD_SIZE, DTYPE)
        tables = _BlockTables(config, layout, lengths, new)
        raw = torch.randint(
            0, 256, (tables.num_blocks, NUM_KV_HEADS, 1, pool_block_bytes([layout])), dtype=torch.uint8, device=device
        )
        vq = VQPages.view(raw[..., : layout.vq_page_bytes], layout)
        recency = RecencyPages.view(raw[..., : layout.recency_page_bytes], layout, DTYPE)
        _fill(vq, recency, tables, device)
        setup = layer_setup(config, preset, NUM_KV_HEADS, length, batch, device)
        self.state = LayerState.of(setup, vq, recency)
        starts = torch.arange(0, (batch + 1) * new, new, dtype=torch.int32)
        self.step = StepPlan(
            query_start_loc=starts.to(device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            vq_block_table=tables.vq.to(device),
            recency_block_table=tables.recency.to(device),
            max_query_len=new,
            max_seq_len=length,
            query_start_loc_cpu=starts,
        )
        parts = footprint([layout], config, length)
        self.kv_bytes = batch * NUM_KV_HEADS * (parts.codes + parts.anchors + parts.recency)


def in_any_phase(batch: int, length: int) -> list[int]:
    """Lengths of requests that are up to a block shorter than `length`: one in 128 fills its block."""
    return (length - torch.randint(min(VQ_BLOCK_SIZE, length), (batch,))).tolist()


class _BlockTables:
    """Block tables as the block managers would leave them; block 0 is the null block.

    vq, recency: (batch, ...) int32.
    """

    def __init__(self, config: AntKVConfig, layout: PageLayout, lengths: list[int], new: int) -> None:
        size, batch, longest = layout.recency_block_size, len(lengths), max(lengths)
        retention = page_retention(config, longest, size, 0)
        blocks = -(-longest // VQ_BLOCK_SIZE)
        self.recency = torch.zeros(batch, -(-longest // size), dtype=torch.int32)
        for request, length in enumerate(lengths):
            # The step reads what was kept for it, and writes the pages that later steps read.
            first = (length - new) // size
            written = first + np.flatnonzero(retention.pages_of_step(first, length))
            self.recency[request, [*retention.pages_at(length - new).tolist(), *written.tolist()]] = 1
        held = self.recency > 0
        # In no order, as a pool that has been in use hands them out.
        order = torch.randperm(batch * blocks + int(held.sum()), dtype=torch.int32) + 1
        self.num_blocks = len(order) + 1
        self.vq = order[: batch * blocks].view(batch, blocks)
        self.recency[held] = order[batch * blocks :]


def _fill(vq: VQPages, recency: RecencyPages, tables: _BlockTables, device: str) -> None:
    """Numbers where random bytes would be none."""
    blocks, pages = tables.vq.flatten().long().to(device), tables.recency.flatten().unique().long().to(device)
    for rows in (vq.k_anchors, vq.v_anchors):
        errors = torch.randn(len(blocks), *rows.shape[1:], device=device)
        rows[blocks] = correction(errors, torch.zeros_like(errors))
    for rows in (recency.k, recency.v):
        rows[pages] = torch.randn(len(pages), *rows.shape[1:], dtype=rows.dtype, device=device)
    recency.scores[pages] = torch.rand(len(pages), *recency.scores.shape[1:], device=device)
    anchors = vq.anchor_offsets.shape[3]
    offsets = torch.rand(len(blocks), NUM_KV_HEADS, 2, VQ_BLOCK_SIZE, device=device).topk(anchors).indices
    vq.anchor_offsets[blocks] = offsets.sort().values.short()
    # The block that is being filled has no anchors yet; where all are shorter, nobody reads the last one.
    vq.anchor_offsets[tables.vq[:, -2:].flatten().long().to(device)] = -1


def _scratch(device: str, *shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """Memory of the call's own; a CUDA graph keeps what it was captured with."""
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes_and_dtypes]


def layer_setup(
    config: AntKVConfig, preset: str, num_kv_heads: int, length: int, max_num_reqs: int, device: str
) -> LayerSetup:
    """Of so many KV heads, for requests up to this length."""
    kind, num_heads = get_preset(preset), NUM_HEADS // NUM_KV_HEADS * num_kv_heads
    rotary = _rotary(length, device)
    order = interleaved(rotary, HEAD_SIZE, kind.sub_vector_size)
    shape = (num_kv_heads, kind.num_sub_vectors(HEAD_SIZE), kind.num_centroids, kind.sub_vector_size)
    k_centroids, v_centroids = (served(torch.randn(shape, device=device).half()).float() for _ in "kv")
    return LayerSetup(
        config=config,
        preset=kind,
        k_centroids=k_centroids,
        v_centroids=v_centroids,
        k_order=torch.tensor(order, dtype=torch.int32, device=device),
        rotary=reordered(rotary, order),
        jensen_weights=torch.rand(num_heads, HEAD_SIZE, device=device) / HEAD_SIZE,
        last_query=last_query_table(config, length).to(device),
        num_heads=num_heads,
        rules=LogitRules(SCALE),
        counters=Counters(torch.device(device), "benchmark", max_num_reqs),
        counts_rows=False,
        max_num_reqs=max_num_reqs,
        scratch=partial(_scratch, device),
    )


def _rotary(length: int, device: str) -> RotaryTable:
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_SIZE, 2, device=device) / HEAD_SIZE)
    # As vLLM makes its table: at least a block, whatever the length.
    angles = torch.arange(max(length, VQ_BLOCK_SIZE), device=device)[:, None] * frequencies
    return RotaryTable(angles.cos(), angles.sin())
