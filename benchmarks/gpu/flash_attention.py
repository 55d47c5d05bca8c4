"""FlashAttention 3 as vLLM ships and calls it, on paged caches in bfloat16 or FP8, full of random rows."""

from collections.abc import Callable

import torch

from benchmarks.gpu.llama import BFLOAT16_BYTES, HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, SCALE

#: vLLM's own block size.
BLOCK_SIZE = 16


def decode(batch: int, context: int, fp8: bool) -> tuple[Callable[[], torch.Tensor], int]:
    """One decode step of `batch` requests, and the bytes of the cache that it reads.

    The schedule is made beforehand, as vLLM does for its CUDA graphs; with FP8 queries are FP8 too.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    blocks = -(-context // BLOCK_SIZE)
    shape = (batch * blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    key, value = (torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype) for _ in "kv")
    query = torch.randn(batch, NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device="cuda").to(dtype)
    output = torch.full(query.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    table = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
    scale = torch.ones(batch, NUM_KV_HEADS, device="cuda") if fp8 else None
    schedule = get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=1,
        max_seqlen_k=context,
        num_heads_q=NUM_HEADS,
        num_heads_kv=NUM_KV_HEADS,
        headdim=HEAD_SIZE,
        cache_seqlens=lengths,
        qkv_dtype=dtype,
        cu_seqlens_q=starts,
        page_size=BLOCK_SIZE,
        causal=True,
    )

    def run() -> torch.Tensor:
        return flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=context,
            softmax_scale=SCALE,
            causal=True,
            block_table=table,
            scheduler_metadata=schedule,
            q_descale=scale,
            k_descale=scale,
            v_descale=scale,
            fa_version=3,
        )

    return run, batch * context * BFLOAT16_BYTES // (2 if fp8 else 1)


def prefill(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Causal attention of queries to their prompt, which ends with them: (num_tokens, heads, HEAD_SIZE) bfloat16."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    starts, key_starts = (torch.tensor([0, len(rows)], dtype=torch.int32, device="cuda") for rows in (query, key))
    output = torch.full_like(query, torch.nan)

    def run() -> torch.Tensor:
        return flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=starts,
            max_seqlen_q=len(query),
            cu_seqlens_k=key_starts,
            max_seqlen_k=len(key),
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
        )

    return run
