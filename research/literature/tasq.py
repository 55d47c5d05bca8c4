"""`tasq-1bit`: channels weighted by queries, a scale per token, channels grouped by what they share (TaSQ).

K, before RoPE: a channel is multiplied by the root of its query moment (`query_moments`; mean square 1), a token
divided by the RMS that all its KV heads have then, in float16. Pairs of channels that RoPE turns together are matched
to fours, and these to groups of 8, so that the determinants of the groups' covariances are small. A group has 1,024
centroids. V: the same number for each 8 channels as they come. k-means weights a row by its squared gradient, as the
authors' code does. Exact by the paper: the last 64 tokens.

Learned from a calibration text alone: 1,024 centroids want more than the first tokens of a window.
"""

from dataclasses import dataclass, field
from itertools import combinations

import networkx
import torch

from research.literature.learn import learned_from
from research.literature.query_moments import channel_pairs
from research.literature.request import LiteratureRequest, Sample
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import SettingsError
from vllm_antkv.offline.kmeans import learn_centroids
from vllm_antkv.offline.method import Method
from vllm_antkv.ops.reference import decode, encode
from vllm_antkv.ops.rope import RotaryTable, rotate, unrotate
from vllm_antkv.presets import Preset

NAMES = ("tasq-1bit",)

_CODES = Preset(NAMES[0], 8, 1024)
_SCALE_BITS = 16
_WINDOW = 64
#: Lloyd's iterations beside those of `learn_centroids`, which stops within 8% of the end. The authors take 100.
_FURTHER = 10
#: Of the largest: below it, a channel that hardly any query looks at could not be divided by its weight.
_LEAST_MOMENT = 1e-6
#: Added to covariances as a share of their mean variance.
_NOISE = 1e-4
#: Of a row, relative to the mean; k-means needs weights that float32 can add up.
_LEAST_WEIGHT = 1e-6
_LEAST_SCALE = 1e-4


@dataclass(frozen=True)
class Tables:
    """What is learned of a layer.

    weights: (num_kv_heads, head_size), what channels of K are multiplied by.
    order: (num_kv_heads, head_size) int64, channels of K as groups of 8 take them.
    key, value: (num_kv_heads, num_groups, num_centroids, 8).
    """

    weights: torch.Tensor
    order: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class Tasq:
    """A row depends on itself and on the calibration text."""

    sample: Sample
    _tables: dict[int, Tables] = field(default_factory=dict, repr=False, compare=False)

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`. What is learned of a layer is kept."""
        if layer not in self._tables:
            self._tables[layer] = learn_tables(self.sample, layer, rotary, key)
        tables, positions = self._tables[layer], torch.arange(key.shape[1], device=key.device)
        weighted = unrotate(key, positions, rotary) * tables.weights
        scales = _token_scales(weighted)
        order = tables.order.expand_as(key)
        coded = _nearest((weighted / scales).gather(-1, order), tables.key)
        coded_key = torch.empty_like(key).scatter_(-1, order, coded) * scales / tables.weights
        return rotate(coded_key, positions, rotary), _nearest(value, tables.value)

    def element_bits(self, identity: ModelIdentity, num_tokens: int) -> tuple[float, float]:
        """See `CountedQuantiser.element_bits`."""
        scale = _SCALE_BITS / (identity.num_kv_heads * identity.head_size)
        return _CODES.nominal_bits + scale, _CODES.nominal_bits


def learn_tables(sample: Sample, layer: int, rotary: RotaryTable, like: torch.Tensor) -> Tables:
    """Learn those of a layer, on the device and in the dtype of the rows `like`."""
    fisher_key, fisher_value = (rows[layer].flatten(0, 1).to(like) for rows in (sample.key_fisher, sample.value_fisher))
    keys, values = (rows[layer].flatten(0, 1).to(like) for rows in (sample.plain_key, sample.value))
    moments = sample.query_moments[layer].to(like)
    least = (_LEAST_MOMENT * moments.amax(-1, keepdim=True)).clamp(min=torch.finfo(moments.dtype).tiny)
    moments = torch.maximum(moments, least)
    weights = (moments / moments.mean(-1, keepdim=True)).sqrt()
    scales = _token_scales(keys * weights)
    rows = keys * weights / scales
    pairs = channel_pairs(rotary, rows.shape[-1])
    order = torch.tensor([grouped(torch.cov(head.T), pairs) for head in rows.double().unbind(1)], device=like.device)
    # An error of a row is one of the key in units of the scale over the weight.
    fisher_key = fisher_key * (scales / weights).square()
    every = order.expand_as(rows)
    return Tables(
        weights,
        order,
        key=_centroids(rows.gather(-1, every), fisher_key.gather(-1, every), seed=2 * layer),
        value=_centroids(values, fisher_value, seed=2 * layer + 1),
    )


def grouped(covariance: torch.Tensor, pairs: list[list[int]]) -> list[int]:
    """All channels of a head, those of a group one behind the other.

    Twice, units are matched two by two so that the sum of det^(1 / n) of what comes about, of n channels, is least.

    Args:
        covariance: (head_size, head_size) float64.
        pairs: channels that stay together.
    """
    noise = (_NOISE * covariance.diagonal().mean()).clamp(min=torch.finfo(covariance.dtype).tiny)
    covariance = covariance + noise * torch.eye(len(covariance), device=covariance.device)
    units = pairs
    while (size := 2 * len(units[0])) <= _CODES.sub_vector_size:
        edges = list(combinations(range(len(units)), 2))
        channels = torch.tensor([units[first] + units[second] for first, second in edges], device=covariance.device)
        blocks = covariance[channels[:, :, None], channels[:, None]]
        costs = (torch.linalg.slogdet(blocks).logabsdet / size).exp().tolist()
        graph = networkx.Graph()
        graph.add_weighted_edges_from((*edge, cost) for edge, cost in zip(edges, costs, strict=True))
        matched = sorted(sorted(edge) for edge in networkx.min_weight_matching(graph))
        units = [units[first] + units[second] for first, second in matched]
    return [channel for unit in units for channel in unit]


def _token_scales(weighted: torch.Tensor) -> torch.Tensor:
    """(..., num_kv_heads, head_size) -> (..., 1, 1), as float16 keeps them."""
    scales = weighted.square().mean((-2, -1), keepdim=True).sqrt()
    return scales.half().to(weighted).clamp(min=_LEAST_SCALE)


def _centroids(rows: torch.Tensor, fisher: torch.Tensor, seed: int) -> torch.Tensor:
    """Rows (num_rows, num_kv_heads, head_size) and how much the loss minds an error of each channel."""
    in_groups = (part.unflatten(-1, (-1, _CODES.sub_vector_size)).float() for part in (rows, fisher))
    points, minded = (part.flatten(1, 2).transpose(0, 1) for part in in_groups)
    weights = minded.sum(-1)
    weights = (weights / weights.mean(1, keepdim=True)).nan_to_num(1).clamp(min=_LEAST_WEIGHT)
    number = min(_CODES.num_centroids, points.shape[1])
    centroids = learn_centroids(points, weights, number, seed, further=_FURTHER)
    return centroids.unflatten(0, (rows.shape[1], -1)).half().to(rows)


def _nearest(rows: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """(num_windows, num_tokens, num_kv_heads, head_size) -> same."""
    return decode(encode(rows.flatten(0, 1), centroids), centroids).unflatten(0, rows.shape[:2])


def build(name: str, request: LiteratureRequest) -> Method:
    """The paper's window, or the recency that all methods share."""
    sample = request.sample
    if sample is None or not sample.key_fisher:
        raise SettingsError(f"{name} learns from queries and gradients on a text: give --calibration TEXT.")
    _CODES.num_sub_vectors(request.identity.head_size)
    return request.coded(
        name,
        _CODES.nominal_bits,
        Tasq(sample),
        request.retention(_WINDOW),
        learned_from=learned_from(sample),
        tokens=sample.value[0].shape[:2].numel(),
    )
