"""`kvquant-Xbit`: non-uniform levels, K before RoPE per channel, V per token, outliers apart (KVQuant, section 3).

K: every channel has an inlier range, the 0.5% and 99.5% quantiles of the rows learned from (sections 3.1, 3.2, 3.4);
within it a row is rounded to 2^X levels that a layer's channels share, learned by k-means (section 3.3). V: the same,
but a token's range is that of its own inliers, found online and kept as two float16. Outliers, 1% of a token's K and of
its V (at least one value), are kept exactly: those of K farthest outside their channel's range, where the paper has all
that lie outside it, so that a token's size is fixed; those of V farthest from the token's median. An outlier costs 32
bits, value and index.

Of the paper's parts, k-means is not weighted by Fisher information and 2 bits have no Q-Norm. The first 4 tokens stay
exact (attention-sink aware quantisation, section 3.5; the paper keeps 1).
"""

from dataclasses import dataclass

import torch

from research.literature.learn import FIRST_TOKENS, learned_from, learning_rows
from research.literature.lloyd import lloyd_max, round_to_levels
from research.literature.request import LiteratureRequest, Sample
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.offline.method import Method
from vllm_antkv.ops.rope import RotaryTable, rotate, unrotate

NAMES = ("kvquant-1bit", "kvquant-2bit", "kvquant-3bit", "kvquant-4bit")

_OUTLIERS = 0.01
_OUTLIER_BITS = 16 + 16
_FIRST = 4
#: Values that levels are learned from, at most.
_MAX_VALUES = 1 << 18


@dataclass(frozen=True)
class KVQuant:
    """A row depends on itself and on the rows learned from."""

    bits: int
    sample: Sample | None

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        positions = torch.arange(key.shape[1], device=key.device)
        known_keys, known_values = learning_rows(self.sample, layer, key, value, rotary)
        low, high = _inlier_range(known_keys)
        plain = unrotate(key, positions, rotary)
        coded_key = self._round(plain.flatten(-2), low, high, known_keys, low, high).view_as(key)
        value_rows = value.flatten(-2)
        coded_value = self._round(value_rows, *_own_range(value_rows), known_values, *_own_range(known_values))
        return rotate(coded_key, positions, rotary), coded_value.view_as(value)

    def _round(
        self,
        rows: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        known: torch.Tensor,
        known_low: torch.Tensor,
        known_high: torch.Tensor,
    ) -> torch.Tensor:
        """Rows (num_windows, num_tokens, channels) rounded within their ranges, outliers put back."""
        inside = _normalise(known, known_low, known_high).clamp(-1, 1).flatten(1)
        step = -(-inside.shape[1] // _MAX_VALUES)
        levels = lloyd_max(inside[:, ::step], self.bits)
        scaled = _normalise(rows, low, high)
        rounded = round_to_levels(scaled.flatten(1), levels).view_as(rows)
        coded = rounded * (high - low) / 2 + (high + low) / 2
        slots = num_outliers(rows.shape[-1])
        farthest = scaled.abs().topk(slots, dim=-1)
        # A value within its range is no outlier, and its slot stays empty.
        kept = torch.where(farthest.values > 1, rows.gather(-1, farthest.indices), coded.gather(-1, farthest.indices))
        return coded.scatter(-1, farthest.indices, kept)

    def element_bits(self, identity: ModelIdentity, num_tokens: int) -> tuple[float, float]:
        """See `CountedQuantiser.element_bits`; outlier slots are counted whether they are filled or not."""
        channels = identity.num_kv_heads * identity.head_size
        sparse = num_outliers(channels) * _OUTLIER_BITS / channels
        key, value = self.bits + sparse, self.bits + sparse + 2 * 16 / channels
        if self.sample is None:
            levels = 16 * 2**self.bits
            key += (2 * 16 * channels + levels) / (num_tokens * channels)
            value += levels / (num_tokens * channels)
        return key, value


def num_outliers(channels: int) -> int:
    """Values kept exactly of a row of so many channels."""
    return max(1, round(_OUTLIERS * channels))


def _normalise(rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """To [-1, 1] where rows lie within their range."""
    return (2 * rows - high - low) / (high - low).clamp(min=torch.finfo(rows.dtype).eps)


def _inlier_range(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every channel over tokens: two of (num_windows, 1, channels)."""
    ordered = rows.sort(dim=1).values
    cut = round(_OUTLIERS / 2 * (rows.shape[1] - 1))
    return ordered[:, cut : cut + 1], ordered[:, rows.shape[1] - 1 - cut : rows.shape[1] - cut]


def _own_range(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every token over channels, outliers left out: two of (num_windows, num_tokens, 1), as float16 keeps them."""
    slots = num_outliers(rows.shape[-1])
    distance = (rows - rows.median(dim=-1, keepdim=True).values).abs()
    inliers = rows.gather(-1, distance.topk(rows.shape[-1] - slots, dim=-1, largest=False).indices)
    low, high = inliers.aminmax(dim=-1, keepdim=True)
    return low.half().to(rows), high.half().to(rows)


def build(name: str, request: LiteratureRequest) -> Method:
    """First tokens of the paper, or the recency that all methods share."""
    sample = request.sample
    retention = request.retention(first=_FIRST, learn=FIRST_TOKENS if sample is None else 0)
    learned = learned_from(sample)
    return request.rounded(
        name, lambda bits: KVQuant(bits, sample), retention, outliers=_OUTLIERS, learned_from=learned
    )
