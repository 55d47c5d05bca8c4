"""Processors on which PyTorch's bfloat16 products are slower than those in float32."""

import torch

REMEDY = "Serve it with --dtype float32."


def slow_bfloat16(dtype: torch.dtype | None) -> str | None:
    """Why a model of this dtype is slow on this processor; None where it is not."""
    capabilities = torch.cpu.get_capabilities()
    if dtype != torch.bfloat16 or capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"):
        return None
    return "bfloat16, in which this processor multiplies several times more slowly than in float32"
