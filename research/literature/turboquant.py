"""`turboquant-Xbit`: random rotation and Lloyd-Max levels (TurboQuant, section 3.1, algorithm 1), as vLLM serves it.

K after RoPE, per head: a row is divided by its norm (float16) and rotated by a random orthogonal matrix, so that every
channel is close to N(0, 1 / head_size), and rounded to the Lloyd-Max levels of that distribution; when read, it gets
norm 1 again (vLLM's norm correction) before the norm is put back. V, per head, is rounded to nearest with a
float16 scale and zero point, as in vLLM's `turboquant_3bit_nc` and `turboquant_4bit_nc`; the paper rotates V too. Two
differences from vLLM: its rotation is a Hadamard matrix, and it leaves the first and last two layers unquantised.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch

from research.literature import uniform
from research.literature.lloyd import lloyd_max, round_to_levels
from research.literature.request import LiteratureRequest
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.offline.method import Method
from vllm_antkv.ops.rope import RotaryTable

NAMES = ("turboquant-2bit", "turboquant-3bit", "turboquant-4bit")

_NORM_BITS = 16
#: Points that stand for the normal distribution: its levels come out within 0.001 of Max's table.
_NUM_QUANTILES = 1 << 16


@dataclass(frozen=True)
class TurboQuant:
    """A row depends on itself alone."""

    bits: int

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        size = key.shape[-1]
        tiny = torch.finfo(key.dtype).tiny
        norms = key.norm(dim=-1, keepdim=True)
        turn = rotation(size).to(key)
        turned = (key / norms.clamp(min=tiny)) @ turn
        rounded = round_to_levels(turned.flatten()[None], normal_levels(self.bits).to(key) / math.sqrt(size))
        unit = rounded.view_as(key) / rounded.view_as(key).norm(dim=-1, keepdim=True)
        return unit @ turn.T * norms.half().to(key), uniform.round_to_grid(value, self.bits)

    def element_bits(self, identity: ModelIdentity, num_tokens: int) -> tuple[float, float]:
        """See `CountedQuantiser.element_bits`."""
        size = identity.head_size
        return self.bits + _NORM_BITS / size, self.bits + 2 * uniform.PARAMETER_BITS / size


@cache
def rotation(size: int) -> torch.Tensor:
    """A random orthogonal matrix, (size, size) float64, the same at every call."""
    gaussian = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(gaussian).Q


@cache
def normal_levels(bits: int) -> torch.Tensor:
    """Lloyd-Max levels of N(0, 1): (1, 2^bits) float64."""
    shares = (torch.arange(_NUM_QUANTILES, dtype=torch.float64) + 0.5) / _NUM_QUANTILES
    return lloyd_max(torch.special.ndtri(shares)[None], bits)


def build(name: str, request: LiteratureRequest) -> Method:
    """No token stays exact but those of the recency that all methods share."""
    return request.rounded(name, TurboQuant, request.retention())
