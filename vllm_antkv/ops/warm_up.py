"""The first calls of kernels that compile and tune themselves, made before anybody waits for them."""

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_antkv.cache.pages import NO_ANCHOR
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.layer import LayerOperations, LayerState
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.ops.varlen import plan_rounds, prefill_limits

#: What the kernels are tuned for: prompts of at most so many tokens together, and so many requests that continue one.
_PROMPT, _BATCH = 2048, 32


def warm_up(build: Callable[[LayerState], LayerOperations], layer: LayerState) -> None:
    """Run a decode step and prompts through a layer's operations.

    The pages must be nobody's yet, and are left dirty.
    """
    if len(layer.recency.k) < 2:
        return
    device = layer.last_query.device
    num_decoded = layer.recency.score_slots
    # Scratch memory has room for no more tokens than a step of vLLM's may have.
    most = _PROMPT if layer.varlen is None else min(_PROMPT, layer.varlen.max_num_tokens)
    length = min(most, len(layer.last_query) - num_decoded)
    num_prompts = min(most // length, layer.max_num_reqs)
    num_reqs = min(_BATCH, layer.max_num_reqs)
    # What is counted here is nobody's, but the kernels must be those that count.
    operations = build(replace(layer, counters=Counters(device, "warm-up", layer.max_num_reqs)))
    # Attending must meet no anchor beyond a block.
    layer.vq.anchor_offsets.fill_(NO_ANCHOR)
    decodes = _step(layer, [num_decoded] * num_reqs, length + num_decoded)
    # Prompts from their beginning, and such as have a past.
    prompts = _step(layer, [length] * num_prompts, length)
    chunks = _step(layer, [length // 2] * num_prompts, length)
    for step in (decodes, prompts, chunks):
        for with_sinks in (False, True):
            _run(operations, layer, step, with_sinks)


def _step(layer: LayerState, query_lens: list[int], seq_len: int) -> StepPlan:
    """Requests of `seq_len` tokens, which share their pages where the pool is small.

    Block tables are as wide as vLLM's, which have room for the longest request: Triton compiles anew for a width that
    is a multiple of 16 where another was not.
    """
    device = layer.last_query.device

    def table(pages: torch.Tensor, page_size: int) -> torch.Tensor:
        width = -(-len(layer.last_query) // page_size)
        # Those of the null block, which has a page of recent rows, stay as they are.
        null = len(pages) // len(layer.recency.k)
        ids = null + torch.arange(width, dtype=torch.int32, device=device) % (len(pages) - null)
        return ids.repeat(len(query_lens), 1)

    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    query_start_loc = torch.tensor(starts, dtype=torch.int32)
    seq_lens = torch.full((len(query_lens),), seq_len, dtype=torch.int32)
    limits = prefill_limits(layer, layer.recency.score_slots)
    return StepPlan(
        query_start_loc=query_start_loc.to(device),
        seq_lens=seq_lens.to(device),
        vq_block_table=table(layer.vq.k_codes, VQ_BLOCK_SIZE),
        recency_block_table=table(layer.recency.k, layer.recency.k.shape[2]),
        max_query_len=max(query_lens),
        max_seq_len=seq_len,
        query_start_loc_cpu=query_start_loc,
        rounds=None if limits is None else plan_rounds(query_start_loc, seq_lens, limits, device),
    )


def _run(operations: LayerOperations, layer: LayerState, step: StepPlan, with_sinks: bool) -> None:
    """A step of random rows."""
    num_tokens = step.max_query_len * step.num_reqs
    num_kv_heads, head_size = layer.k_centroids.shape[0], layer.recency.k.shape[-1]
    # As they come from one projection.
    sizes = [layer.num_heads, num_kv_heads, num_kv_heads]
    dtype, device = layer.recency.k.dtype, layer.last_query.device
    fused = torch.randn(num_tokens, sum(sizes), head_size, dtype=dtype, device=device)
    is_sink = torch.zeros(num_tokens, dtype=torch.bool, device=device) if with_sinks else None
    query, key, value = fused.split(sizes, dim=1)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    operations.run(StepRows(query, key, value, is_sink), output, step)
