"""`skvq-Xbit`: channels reordered, groups clipped, a window and sinks exact (SKVQ, section 3).

Channels of a token (K before RoPE, V; heads side by side) are sorted by the range they have in the rows learned from,
so that a group of 64 holds channels alike; the paper clusters them by k-means, which makes groups of unequal size. Each
group is rounded to nearest between its ends times a clipping factor, the one with the least squared error on the rows
learned from. Scale and zero point are kept as FP8 (E4M3). Exact by the paper: 5 sinks and the last 32 tokens.
"""

from dataclasses import dataclass

import torch

from research.literature import uniform
from research.literature.learn import FIRST_TOKENS, learned_from, learning_rows
from research.literature.request import LiteratureRequest, Sample
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.offline.method import Method
from vllm_antkv.ops.rope import RotaryTable, rotate, unrotate

NAMES = ("skvq-1bit", "skvq-2bit", "skvq-4bit")

_GROUP = 64
#: Down to where the two levels of a normal distribution lie when a group of 64 gives the ends.
_CLIPS = tuple(percent / 100 for percent in range(100, 25, -5))
_SINKS = 5
_WINDOW = 32
_PARAMETERS = torch.float8_e4m3fn
_PARAMETER_BITS = 8


@dataclass(frozen=True)
class Skvq:
    """A row depends on itself and on the rows learned from."""

    bits: int
    sample: Sample | None

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        positions = torch.arange(key.shape[1], device=key.device)
        known_keys, known_values = learning_rows(self.sample, layer, key, value, rotary)
        coded_key = self._round(unrotate(key, positions, rotary), known_keys)
        return rotate(coded_key, positions, rotary), self._round(value, known_values)

    def _round(self, rows: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Rows (num_windows, num_tokens, num_kv_heads, head_size); known (num_windows or 1, num_rows, channels)."""
        spread = known.amax(dim=1, keepdim=True) - known.amin(dim=1, keepdim=True)
        order = spread.argsort(dim=-1)
        groups = _grouped(rows.flatten(-2), order)
        clip = self._best_clips(_grouped(known, order))
        rounded = uniform.round_to_grid(groups, self.bits, clip, _PARAMETERS).flatten(-2)
        return torch.take_along_dim(rounded, order.argsort(dim=-1), dim=-1).view_as(rows)

    def _best_clips(self, groups: torch.Tensor) -> torch.Tensor:
        """(num_windows, num_rows, num_groups, group) -> (num_windows, 1, num_groups, 1)."""
        errors = []
        for clip in _CLIPS:
            error = uniform.round_to_grid(groups, self.bits, clip, _PARAMETERS) - groups
            errors.append(error.square().sum(dim=(1, 3), keepdim=True))
        return torch.tensor(_CLIPS).to(groups)[torch.stack(errors).argmin(dim=0)]

    def element_bits(self, identity: ModelIdentity, num_tokens: int) -> tuple[float, float]:
        """See `CountedQuantiser.element_bits`."""
        channels = identity.num_kv_heads * identity.head_size
        group = uniform.group_size(channels, _GROUP)
        bits = self.bits + 2 * _PARAMETER_BITS / group
        if self.sample is None:
            bits += (16 * channels + 16 * channels / group) / (num_tokens * channels)
        return bits, bits


def _grouped(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """(num_windows, num_rows, channels) -> (num_windows, num_rows, num_groups, group), channels in `order`."""
    group = uniform.group_size(rows.shape[-1], _GROUP)
    return torch.take_along_dim(rows, order, dim=-1).unflatten(-1, (-1, group))


def build(name: str, request: LiteratureRequest) -> Method:
    """Sinks and window of the paper, or the recency that all methods share."""
    sample = request.sample
    retention = request.retention(_WINDOW, _SINKS, FIRST_TOKENS if sample is None else 0)
    return request.rounded(
        name, lambda bits: Skvq(bits, sample), retention, group=_GROUP, learned_from=learned_from(sample)
    )
