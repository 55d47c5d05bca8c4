"""vLLM's TurboQuant decode kernel on a paged cache that its own store kernel has filled with random rows."""

import math
from collections.abc import Callable

import torch
from scipy.linalg import hadamard

from benchmarks.gpu.llama import HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, SCALE

BLOCK_SIZE = 16
#: Rows stored at a time: they are made in bfloat16 first, which must not need the memory of a bfloat16 cache.
_STORED_TOGETHER = 1 << 18


def decode(batch: int, context: int, cache_dtype: str) -> tuple[Callable[[], torch.Tensor], int]:
    """One decode step of `batch` requests, and the bytes of the cache that it reads.

    Args:
        cache_dtype: `turboquant_3bit_nc` or `turboquant_4bit_nc`.
    """
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention
    from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

    form = TurboQuantConfig.from_cache_dtype(cache_dtype, HEAD_SIZE)
    # The orthonormal, symmetric one that vLLM turns keys and queries by.
    rotation = torch.from_numpy(hadamard(HEAD_SIZE, float) / math.sqrt(HEAD_SIZE)).float().cuda()
    centroids = get_centroids(HEAD_SIZE, form.centroid_bits).float().cuda()
    ordered = centroids.sort().values
    midpoints = (ordered[:-1] + ordered[1:]) / 2
    blocks = -(-context // BLOCK_SIZE)
    shape = (batch * blocks, BLOCK_SIZE, NUM_KV_HEADS, form.slot_size_aligned)
    cache = torch.empty(shape, dtype=torch.uint8, device="cuda")
    for slots in torch.arange(batch * blocks * BLOCK_SIZE, device="cuda").split(_STORED_TOGETHER):
        rows = torch.randn(2, len(slots), NUM_KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
        triton_turboquant_store(
            *rows,
            cache,
            slots,
            rotation,
            midpoints,
            mse_bits=form.key_mse_bits,
            key_packed_size=form.key_packed_size,
            value_quant_bits=form.effective_value_quant_bits,
        )
    query = torch.randn(batch, NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        return triton_turboquant_decode_attention(
            query,
            cache,
            table,
            lengths,
            rotation,
            centroids,
            SCALE,
            mse_bits=form.key_mse_bits,
            key_packed_size=form.key_packed_size,
            value_quant_bits=form.effective_value_quant_bits,
            norm_correction=form.norm_correction,
            PiT=rotation,
        )

    return run, batch * context * NUM_KV_HEADS * form.slot_size_aligned
