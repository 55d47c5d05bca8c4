"""Massive activations are found where they were planted, and nowhere else."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vllm_antkv.calibrate.models import load_model
from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.pretrained import read_config
from vllm_antkv.offline.sinks import SinkChannels, find_channels, find_rule, peak_ratios, sink_mask

WINDOWS, LAYERS, HIDDEN, TOKENS = 10, 6, 32, 400


def ratios(peaks: dict[tuple[int, int], float]) -> np.ndarray:
    """Ordinary ratios, with the given ones at (layer, channel) in every window."""
    generator = np.random.default_rng(0)
    array = generator.uniform(5, 20, (WINDOWS, LAYERS, HIDDEN)).astype(np.float32)
    for (layer, channel), ratio in peaks.items():
        array[:, layer, channel] = ratio
    return array


def magnitudes(num_channels: int = 1) -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.abs(generator.standard_normal((WINDOWS, TOKENS, num_channels))).astype(np.float32)


def test_finds_the_emergence_layer_and_orders_channels_by_strength() -> None:
    peaks = {(layer, 7): 900.0 for layer in range(1, 5)} | {(layer, 3): 2000.0 for layer in range(1, 5)}
    assert find_channels(ratios(peaks)) == SinkChannels(1, (3, 7))


def test_a_passing_peak_is_no_emergence() -> None:
    assert find_channels(ratios({(0, 5): 500.0})) is None


def test_a_peak_in_some_windows_only_is_not_stable() -> None:
    array = ratios({(layer, 3): 2000.0 for layer in range(LAYERS)})
    array[:3, :, 3] = 10
    assert find_channels(array) is None


def test_no_outliers_no_sinks() -> None:
    assert find_channels(ratios({})) is None


def test_threshold_parts_planted_sinks_with_margin() -> None:
    values = magnitudes(2)
    sinks = np.zeros((WINDOWS, TOKENS), bool)
    sinks[:, [0, 1]] = True
    sinks[4, 300] = True
    values[sinks, 0] = np.linspace(80, 3000, sinks.sum())
    values[sinks, 1] = 60
    found = SinkChannels(2, (9, 4))
    rule = find_rule(found, values)
    assert rule.layer == 2
    assert rule.channels == (9, 4)
    assert values[~sinks].max() * 1.4 < rule.threshold < 80 / 1.4
    np.testing.assert_array_equal(sink_mask(rule, found, values), sinks)


def test_a_channel_in_which_other_tokens_are_large_is_left_out() -> None:
    values = magnitudes(2)
    values[:, 0] = 1000
    values[:, 200:, 1] = 100
    rule = find_rule(SinkChannels(0, (9, 4)), values)
    assert rule.channels == (9,)


def test_a_continuum_has_no_threshold() -> None:
    values = np.random.default_rng(0).lognormal(0, 1.5, (WINDOWS, TOKENS, 1)).astype(np.float32)
    assert find_rule(SinkChannels(0, (1,)), values) is None


def test_threshold_is_on_raw_values() -> None:
    """Serving compares hidden states as they are: scaled states have a scaled threshold."""
    values = magnitudes()
    values[:, 0] = 1000
    found = SinkChannels(0, (1,))
    rule, scaled = find_rule(found, values), find_rule(found, values * 4)
    np.testing.assert_allclose(scaled.threshold, 4 * rule.threshold, rtol=1e-6)


def plant(model: nn.Module) -> None:
    """Token 9 carries 500 in channel 11 of its embedding, from where the residual stream carries it on."""
    with torch.no_grad():
        model.get_input_embeddings().weight[9, 11] = 500.0  # type: ignore[operator, union-attr]


def test_finds_what_is_planted_in_a_model_and_nothing_without(make_model: Callable[..., Path]) -> None:
    windows = torch.randint(10, 300, (4, 100), generator=torch.Generator().manual_seed(0))
    windows[:, [0, 40]] = 9
    found = []
    for edit in (plant, None):
        folder = str(make_model("llama", edit=edit))
        model = load_model(folder, read_config(folder, CalibrationError), torch.device("cpu"))
        found.append(find_channels(np.stack([peak_ratios(model, window) for window in windows])))
    assert found[0] == SinkChannels(0, (11,))
    assert found[1] is None
