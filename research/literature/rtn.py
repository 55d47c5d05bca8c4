"""`rtn-Xbit`: round to nearest, per token, asymmetric; the baseline of every paper (KIVI, table 1).

K after RoPE and V alike, in groups of 128 channels of a token; scale and zero point in float16.
"""

from dataclasses import dataclass

import torch

from research.literature import uniform
from research.literature.request import LiteratureRequest
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.offline.method import Method
from vllm_antkv.ops.rope import RotaryTable

NAMES = ("rtn-2bit", "rtn-3bit", "rtn-4bit")

_GROUP = 128


@dataclass(frozen=True)
class RoundToNearest:
    """A row depends on itself alone."""

    bits: int

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        group = uniform.group_size(key.shape[-2] * key.shape[-1], _GROUP)
        return uniform.per_token(key, self.bits, group), uniform.per_token(value, self.bits, group)

    def element_bits(self, identity: ModelIdentity, num_tokens: int) -> tuple[float, float]:
        """See `CountedQuantiser.element_bits`."""
        group = uniform.group_size(identity.num_kv_heads * identity.head_size, _GROUP)
        bits = self.bits + 2 * uniform.PARAMETER_BITS / group
        return bits, bits


def build(name: str, request: LiteratureRequest) -> Method:
    """No token stays exact but those of the recency that all methods share."""
    return request.rounded(name, RoundToNearest, request.retention(), group=_GROUP)
