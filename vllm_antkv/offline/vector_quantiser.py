"""The coupled vector quantiser that CQ and AnTKV share: codes of K before RoPE and of V (AnTKV, section 4.1)."""

from dataclasses import dataclass

import torch

from vllm_antkv.codebook import Codebook
from vllm_antkv.ops.fp8_tables import served
from vllm_antkv.ops.reference import decode, encode
from vllm_antkv.ops.rope import RotaryTable, rotate, unrotate


@dataclass(frozen=True)
class VectorQuantiser:
    """Rows come back as their nearest centroids. A row depends on itself alone.

    A gradient reaches the centroids, and the rows as if they came back as they are.
    """

    codebook: Codebook

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`. Computes in the dtype of `key`, as the serving engine does in float32."""
        positions = torch.arange(key.shape[1], device=key.device)
        plain_key = unrotate(key, positions, rotary)
        order = self.codebook.header.k_order(layer)
        if order is None:
            coded_key = _nearest(plain_key, self.codebook.k[layer])
        else:
            coded_key = torch.empty_like(plain_key)
            coded_key[..., list(order)] = _nearest(plain_key[..., list(order)], self.codebook.k[layer])
        return rotate(coded_key, positions, rotary), _nearest(value, self.codebook.v[layer])


def _nearest(rows: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """(num_windows, num_tokens, num_kv_heads, head_size) -> same, every sub-vector replaced by its centroid."""
    centroids = centroids.to(rows)
    plain = centroids.detach()
    # Centroids that are trained get their gradient past the rounding. What is added is exact.
    centroids = centroids + (served(plain) - plain)
    codes = encode(rows.detach().flatten(0, 1), centroids.detach())
    found = decode(codes, centroids).unflatten(0, rows.shape[:2])
    return found + (rows - rows.detach()) if rows.requires_grad else found
