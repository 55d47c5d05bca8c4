"""Massive activations are found where they were planted, and nowhere else."""

import numpy as np

from vllm_antkv.offline.sinks import SinkChannels, find_channels, find_rule, sink_mask

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


def test_finds_the_emergence_layer_and_orders_channels_by_strength():
    peaks = {(layer, 7): 900.0 for layer in range(1, 5)} | {(layer, 3): 2000.0 for layer in range(1, 5)}
    assert find_channels(ratios(peaks)) == SinkChannels(1, (3, 7))


def test_what_does_not_last_or_is_not_in_all_windows_is_no_emergence():
    assert find_channels(ratios({})) is None
    assert find_channels(ratios({(0, 5): 500.0})) is None
    array = ratios({(layer, 3): 2000.0 for layer in range(LAYERS)})
    array[:3, :, 3] = 10
    assert find_channels(array) is None


def test_threshold_parts_planted_sinks_with_margin():
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


def test_a_channel_in_which_other_tokens_are_large_is_left_out():
    values = magnitudes(2)
    values[:, 0] = 1000
    values[:, 200:, 1] = 100
    rule = find_rule(SinkChannels(0, (9, 4)), values)
    assert rule.channels == (9,)


def test_a_continuum_has_no_threshold():
    values = np.random.default_rng(0).lognormal(0, 1.5, (WINDOWS, TOKENS, 1)).astype(np.float32)
    assert find_rule(SinkChannels(0, (1,)), values) is None
