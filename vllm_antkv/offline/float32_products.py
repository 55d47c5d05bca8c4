"""float32 products on processors where PyTorch has faster ones than those that it takes by itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def faster_products(rounded: bool = False) -> Iterator[None]:
    """Run a model's float32 products through oneDNN where MKL's are slow.

    MKL uses no AVX-512 on AMD's processors: oneDNN takes less than half its time. PyTorch asks oneDNN only where
    products may be rounded to bfloat16, and oneDNN rounds them with AMX alone, which AMD's processors do not have.

    Args:
        rounded: with AMX, too, where what is multiplied is rounded and sums are not: again less than half the time.
    """
    found = torch.cpu.get_capabilities()
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if found.get("avx512_bf16") and (rounded or not found.get("amx_bf16")):
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
