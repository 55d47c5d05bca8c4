from types import SimpleNamespace

import numpy as np
import torch

from vllm_antkv.calibrate.layers import Clustering, key_errors
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import get_preset


def test_errors_are_mean_squares_over_kept_tokens_and_over_pairs_of_channels():
    random = np.random.default_rng(0)
    rows = random.standard_normal((2, 2, 20, 2, 8)).astype(np.float16)
    centroids = random.standard_normal((2, 2, 2, 5, 4)).astype(np.float16)
    kept = random.random((2, 20)) < 0.7
    order = [2, 0, 6, 4, 1, 3, 5, 7]  # channels 0 and 2, 1 and 3 turn together
    rotary = RotaryTable(torch.ones(1, 2), torch.zeros(1, 2))
    how = Clustering(get_preset("antkv-4bit"), order, None, weighted=True, seed=0, device=torch.device("cpu"))
    found = key_errors(SimpleNamespace(rows=lambda layer: rows), 0, kept, centroids, how, rotary)
    for head in range(2):
        squares = np.zeros(8)
        for row in rows[0, kept, head].astype(float):
            for sub_vector in range(2):
                channels = order[4 * sub_vector : 4 * sub_vector + 4]
                errors = (row[channels] - centroids[0, head, sub_vector]) ** 2
                squares[channels] += errors[errors.sum(1).argmin()]
        squares /= kept.sum()
        expected = [squares[[0, 2]].mean(), squares[[1, 3]].mean()] * 2 + squares[4:].tolist()
        np.testing.assert_allclose(found[head], expected, rtol=1e-4)
