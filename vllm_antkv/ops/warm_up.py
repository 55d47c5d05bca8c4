"""The first calls of kernels that compile and tune themselves, made before anybody waits for them."""

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.layer import LayerOperations, LayerState
from vllm_antkv.ops.step import Step

#: What the kernels are tuned for: prompts of so many tokens together, and then so many requests that continue one.
_PROMPT, _BATCH = 2048, 32


def warm_up(build: Callable[[LayerState], LayerOperations], layer: LayerState) -> None:
    """Run prompts and a decode step through a layer's operations.

    Decoding attends first: kernels tune themselves where they are launched first, and those of decoding are launched
    with prompts too, for the single tokens that a step may have beside them.

    The pages must be nobody's yet, and are left dirty.
    """
    num_pages = len(layer.vq.k_codes) - 1
    if num_pages < 1:
        return
    device = layer.last_query.device
    length = min(_PROMPT, len(layer.last_query) - 1)
    num_prompts = min(-(-_PROMPT // length), layer.max_num_reqs)
    num_reqs = min(_BATCH, layer.max_num_reqs)
    # What is counted here is nobody's, but the kernels must be those that count.
    operations = build(replace(layer, counters=Counters(device, "warm-up")))
    prompts = _Call(operations, layer, _step(layer, num_pages, [length] * num_prompts, length))
    decodes = _Call(operations, layer, _step(layer, num_pages, [1] * num_reqs, length + 1))
    for call in (prompts, decodes):
        call.store()
    for call in (decodes, prompts):
        call.attend()


def _step(layer: LayerState, num_pages: int, query_lens: list[int], seq_len: int) -> Step:
    """Requests of `seq_len` tokens, which share their pages where the pool is small.

    Block tables are as wide as vLLM's, which have room for the longest request: Triton compiles anew for a width that
    is a multiple of 16 where another was not.
    """
    device = layer.last_query.device

    def table(page_size: int) -> torch.Tensor:
        width = -(-len(layer.last_query) // page_size)
        ids = 1 + torch.arange(width, dtype=torch.int32, device=device) % num_pages
        return ids.repeat(len(query_lens), 1)

    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    query_start_loc = torch.tensor(starts, dtype=torch.int32)
    seq_lens = torch.full((len(query_lens),), seq_len, dtype=torch.int32)
    return Step(
        query_start_loc=query_start_loc.to(device),
        seq_lens=seq_lens.to(device),
        vq_block_table=table(VQ_BLOCK_SIZE),
        recency_block_table=table(layer.recency.k.shape[2]),
        max_query_len=max(query_lens),
        max_seq_len=seq_len,
        query_start_loc_cpu=query_start_loc,
        seq_lens_cpu=seq_lens,
    )


class _Call:
    """A step of random rows."""

    def __init__(self, operations: LayerOperations, layer: LayerState, step: Step) -> None:
        self._operations, self._layer, self._step = operations, layer, step
        num_tokens = step.max_query_len * step.num_reqs
        num_kv_heads, head_size = layer.k_centroids.shape[0], layer.recency.k.shape[-1]
        # As they come from one projection.
        sizes = [layer.num_heads, num_kv_heads, num_kv_heads]
        dtype, device = layer.recency.k.dtype, layer.last_query.device
        fused = torch.randn(num_tokens, sum(sizes), head_size, dtype=dtype, device=device)
        self._query, self._key, self._value = fused.split(sizes, dim=1)
        self._lse = None
        if layer.votes_on_prompt:
            self._lse = torch.zeros(num_tokens, layer.num_heads, dtype=torch.float32, device=device)

    def store(self) -> None:
        """Write the rows, and choose anchors."""
        self._operations.encode_store(self._key, self._value, self._step)
        if self._layer.config.anchor_rows:
            for is_sink in (None, torch.zeros(len(self._key), dtype=torch.bool, device=self._key.device)):
                self._operations.anchor_score(self._query, self._key, self._value, is_sink, self._lse, self._step)

    def attend(self) -> None:
        """Attend from all rows."""
        output = torch.empty_like(self._query, memory_format=torch.contiguous_format)
        self._operations.attend(self._query, self._key, self._value, output, self._lse, self._step)
