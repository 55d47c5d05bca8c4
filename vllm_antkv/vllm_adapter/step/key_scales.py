"""The scales of K's channels in a worker; what they are for: `codebook.key_scales`."""

from dataclasses import dataclass
from typing import Self

import torch

from vllm_antkv.codebook.key_scales import query_scales


@dataclass(frozen=True)
class LayerScales:
    """What one layer multiplies by, in the model's dtype: exactly, as they are powers of two.

    query: (num_heads, head_size). key: (num_kv_heads, head_size), this rank's KV heads.
    """

    query: torch.Tensor
    key: torch.Tensor

    @classmethod
    def of(cls, k_scale: torch.Tensor, num_heads: int, device: torch.device, dtype: torch.dtype) -> Self:
        """Those of a codebook, (num_kv_heads, head_size)."""
        return cls(query_scales(k_scale, num_heads).to(device, dtype), k_scale.to(device, dtype))
