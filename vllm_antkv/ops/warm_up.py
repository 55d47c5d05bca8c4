"""The first calls of kernels that compile and tune themselves, made before anybody waits for them."""

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.layer import LayerOperations, LayerState
from vllm_antkv.ops.step import Step

#: What the kernels are tuned for: a prompt of so many tokens, and then so many requests that continue it.
_PROMPT, _BATCH = 2048, 32


def warm_up(build: Callable[[LayerState], LayerOperations], layer: LayerState) -> None:
    """Run a prompt and a decode step through a layer's operations.

    The pages must be nobody's yet, and are left dirty.
    """
    num_pages = len(layer.vq.k_codes) - 1
    if num_pages < 1:
        return
    length = min(_PROMPT, len(layer.last_query) - 1)
    operations = build(replace(layer, counts_rows=False))
    _run(operations, layer, _step(layer, num_pages, [length], length))
    num_reqs = min(_BATCH, layer.max_num_reqs)
    _run(operations, layer, _step(layer, num_pages, [1] * num_reqs, length + 1))


def _step(layer: LayerState, num_pages: int, query_lens: list[int], seq_len: int) -> Step:
    """Requests of `seq_len` tokens, which share their pages where the pool is small."""
    device = layer.last_query.device

    def table(page_size: int) -> torch.Tensor:
        ids = 1 + torch.arange(-(-seq_len // page_size), dtype=torch.int32, device=device) % num_pages
        return ids.repeat(len(query_lens), 1)

    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    return Step(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.full((len(query_lens),), seq_len, dtype=torch.int32, device=device),
        vq_block_table=table(VQ_BLOCK_SIZE),
        recency_block_table=table(layer.recency.k.shape[2]),
        max_query_len=max(query_lens),
        max_seq_len=seq_len,
    )


def _run(operations: LayerOperations, layer: LayerState, step: Step) -> None:
    num_tokens = step.max_query_len * step.num_reqs
    num_kv_heads, head_size = layer.k_centroids.shape[0], layer.recency.k.shape[-1]
    dtype, device = layer.recency.k.dtype, layer.last_query.device
    query = torch.randn(num_tokens, layer.num_heads, head_size, dtype=dtype, device=device)
    key, value = torch.randn(2, num_tokens, num_kv_heads, head_size, dtype=dtype, device=device)
    lse = None
    if layer.votes_on_prompt:
        lse = torch.zeros(num_tokens, layer.num_heads, dtype=torch.float32, device=device)
    operations.encode_store(key, value, step)
    if layer.config.anchor_rows:
        for is_sink in (None, torch.zeros(num_tokens, dtype=torch.bool, device=device)):
            operations.anchor_score(query, key, value, is_sink, lse, step)
    operations.attend(query, key, value, torch.empty_like(query), lse, step)
