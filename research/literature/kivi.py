"""`kivi-Xbit`: K per channel, V per token (KIVI, section 3.3, algorithm 1).

K after RoPE is quantised in groups of 32 tokens of one channel, V in groups of 32 channels of one token; scale and zero
point in float16. A group of K can be quantised only once its tokens are there: until then they stay exact. By the paper
they wait for a residual of 128 tokens to fill, which is then quantised as a whole, while V keeps its last 128 tokens.
With the recency that all methods share, K waits for its group of 32 alone.
"""

from dataclasses import dataclass

import torch

from research.literature import uniform
from research.literature.request import LiteratureRequest
from research.literature.retention import Retention, later_of, shared, sliding, until_group_closes
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.offline.method import Method
from vllm_antkv.ops.rope import RotaryTable

NAMES = ("kivi-2bit", "kivi-4bit")

_GROUP = 32
#: R of the paper, a multiple of the group.
_RESIDUAL = 128


@dataclass(frozen=True)
class Kivi:
    """A K row depends on its group of 32 tokens, a V row on itself alone."""

    bits: int

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        group = uniform.group_size(value.shape[-2] * value.shape[-1], _GROUP)
        return uniform.per_channel(key, self.bits, _GROUP), uniform.per_token(value, self.bits, group)

    def element_bits(self, identity: ModelIdentity, num_tokens: int) -> tuple[float, float]:
        """See `CountedQuantiser.element_bits`."""
        group = uniform.group_size(identity.num_kv_heads * identity.head_size, _GROUP)
        parameters = 2 * uniform.PARAMETER_BITS
        return self.bits + parameters / _GROUP, self.bits + parameters / group


def build(name: str, request: LiteratureRequest) -> Method:
    """Residual of the paper, or the recency that all methods share."""
    if request.own_recency:
        retention = Retention(until_group_closes(_RESIDUAL), sliding(_RESIDUAL))
    else:
        recent = shared(request.config)
        retention = Retention(later_of(recent, until_group_closes(_GROUP)), recent)
    return request.rounded(name, Kivi, retention, group=_GROUP, residual=_RESIDUAL)
