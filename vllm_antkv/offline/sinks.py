"""Finds the attention sinks' emergence layer, outlier channels and threshold (KVSink, algorithm 1 and table 3).

Few tokens carry values in few channels of the hidden state that dwarf everything else there; they appear after an early
decoder layer, the emergence layer l_E, and stay for most of the depth. Serving tests `|hidden[c]| > threshold` after
l_E on raw values, so the threshold is learned from raw values too; ratios serve only to find layer and channels.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from vllm_antkv.codebook import SinkRule
from vllm_antkv.offline.hidden import captured_hidden
from vllm_antkv.offline.models import decoder_layers

#: Windows that are looked at to find layer and channels, and tokens of each: sinks are among the first.
PROBE_WINDOWS, PROBE_TOKENS = 8, 256
#: Largest value of an outlier channel over the typical one, per window. The maximum of a Gaussian over 2,048 tokens is
#: 5 times its median magnitude, heavy-tailed channels reach 20; massive activations are in the hundreds and thousands.
_MIN_PEAK = 50.0
#: Share of the windows in which a channel must peak to count as stable.
_MIN_WINDOWS = 0.9
#: Share of the layers after l_E in which a channel must still peak: the outliers vanish in the last layers.
_MIN_LAYERS = 0.5
#: Sinks are few: at most this share of the tokens.
_MAX_SINKS = 0.02
#: Smallest ratio between the weakest sink and the strongest other token. The threshold is their geometric mean.
_MIN_MARGIN = 2.0
#: Smallest value of another token that counts, as a share of the largest.
_FLOOR = 1e-6
#: Channels kept, strongest first; table 3 has at most four.
_MAX_CHANNELS = 4


@dataclass(frozen=True)
class SinkChannels:
    """Sinks show after decoder layer `layer` (hidden_states[layer + 1]) in `channels`, strongest first."""

    layer: int
    channels: tuple[int, ...]


def peak_ratios(model: PreTrainedModel, window: torch.Tensor) -> np.ndarray:
    """How far each channel's largest value stands out, after every decoder layer, in one window.

    Args:
        window: (seq_len,) int64 on the model's device.

    Returns:
        (num_layers, hidden_size) float32.
    """
    ratios: list[torch.Tensor] = []
    with torch.no_grad(), captured_hidden(decoder_layers(model), lambda hidden: ratios.append(peak_ratio(hidden))):
        model.get_decoder()(window[None], use_cache=False)
    return torch.stack(ratios).cpu().numpy()


def peak_ratio(hidden: torch.Tensor) -> torch.Tensor:
    """The largest value of each channel over the typical one, (hidden_size,) float32, of one layer's hidden states.

    The typical value is the median magnitude over tokens of the channel itself or, where that is larger, of all
    channels: a channel that is large everywhere is no outlier, nor is one that is merely sparse.

    Args:
        hidden: (seq_len, hidden_size).
    """
    magnitude = hidden.float().abs()
    typical = torch.maximum(magnitude.median(dim=0).values, magnitude.median())
    return magnitude.amax(0) / typical.clamp(min=torch.finfo(torch.float32).tiny)


def find_channels(ratios: np.ndarray) -> SinkChannels | None:
    """The first layer after which some channels peak in nearly every window, and keep peaking deeper down.

    Args:
        ratios: (num_windows, num_layers, hidden_size), from `peak_ratios`.

    Returns:
        None when no channel does.
    """
    stable = (ratios >= _MIN_PEAK).mean(0) >= _MIN_WINDOWS
    typical_ratio = np.median(ratios, axis=0)
    for layer in range(len(stable)):
        lasting = stable[layer]
        if layer + 1 < len(stable):
            lasting = lasting & (stable[layer + 1 :].mean(0) >= _MIN_LAYERS)
        channels = np.flatnonzero(lasting)
        if len(channels):
            strongest = channels[np.argsort(-typical_ratio[layer, channels], kind="stable")]
            return SinkChannels(layer, tuple(int(channel) for channel in strongest[:_MAX_CHANNELS]))
    return None


def find_rule(found: SinkChannels, values: np.ndarray) -> SinkRule | None:
    """The threshold that parts sinks from other tokens, and the channels in which it does.

    The strongest channel sets it: in the widest gap (as a ratio) among its largest values such that nearly every window
    has a sink. Another channel is kept when that threshold makes no other token a sink there.

    Args:
        found: from `find_channels`.
        values: (num_windows, seq_len, num_channels) float32, |hidden| after `found.layer` in `found.channels`.

    Returns:
        None when no gap is wide enough: the outliers are not separable from other tokens.
    """
    threshold = _gap_threshold(values[..., 0])
    if threshold is None:
        return None
    sinks = values[..., 0] > threshold
    kept = [0]
    for index in range(1, len(found.channels)):
        others = values[..., index][~sinks]
        if others.max(initial=0.0) * np.sqrt(_MIN_MARGIN) <= threshold < values[..., index].max():
            kept.append(index)
    return SinkRule(
        layer=found.layer, channels=tuple(found.channels[index] for index in kept), threshold=float(threshold)
    )


def sink_mask(rule: SinkRule, found: SinkChannels, values: np.ndarray) -> np.ndarray:
    """(num_windows, seq_len) bool, True for sinks, from the `values` that `find_rule` takes."""
    columns = [found.channels.index(channel) for channel in rule.channels]
    return np.any(values[..., columns] > rule.threshold, axis=-1)


def _gap_threshold(values: np.ndarray) -> float | None:
    """`values`: (num_windows, seq_len) magnitudes of one channel."""
    ordered = np.sort(values, axis=None)[::-1].astype(np.float64)
    num_largest = min(max(int(_MAX_SINKS * ordered.size), 1), ordered.size - 1)
    # Where other tokens leave the channel at zero, the geometric mean with it would be no threshold.
    above, below = ordered[:num_largest], np.maximum(ordered[1 : num_largest + 1], _FLOOR * ordered[0])
    # A gap above the peaks of most windows would part the strongest sinks from the others.
    reaches = above <= np.quantile(values.max(axis=1), 1 - _MIN_WINDOWS)
    ratio = np.where(reaches, above / np.maximum(below, np.finfo(np.float32).tiny), 0.0)
    best = int(ratio.argmax())
    if ratio[best] < _MIN_MARGIN:
        return None
    return float(np.sqrt(above[best] * below[best]))
