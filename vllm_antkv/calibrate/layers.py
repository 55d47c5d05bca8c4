"""From the captured activations of a layer to its centroids."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from vllm_antkv.calibrate.capture import CaptureFiles
from vllm_antkv.offline.kmeans import Backend, Problem, solve
from vllm_antkv.presets import Preset

#: A token's weight is its gradient's norm to this power. AnTKV leaves it open; `docs/calibration.md` has the figures.
GRADIENT_POWER = 1
#: Least weight of a token, relative to the mean.
_MIN_WEIGHT = 1e-4


@dataclass(frozen=True)
class Clustering:
    """How layers are clustered.

    k_order: channels of K in the order in which sub-vectors take them; None: as the model has them.
    weighted: by gradients, or every token alike.
    seed: of all layers.
    """

    preset: Preset
    k_order: list[int] | None
    weighted: bool
    seed: int
    backend: Backend


def learn_layer(
    files: CaptureFiles, layer: int, kept: np.ndarray, how: Clustering, advance: Callable[[], object]
) -> np.ndarray:
    """Learn the centroids of one layer.

    Args:
        kept: (num_windows, seq_len) bool, the tokens that are clustered.
        how: see `Clustering`.
        advance: called after every sub-vector position of every head.

    Returns:
        (2, num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) float16, K first.
    """
    preset = how.preset
    shape = files.shape
    num_sub_vectors = preset.num_sub_vectors(shape.head_size)
    rows = files.rows(layer)[:, kept]
    weights = token_weights(files.norms(layer)[:, kept]) if how.weighted else np.ones(rows.shape[:3], np.float32)

    def problem(kind: int, head: int, sub_vector: int) -> Problem:
        order = how.k_order if how.k_order is not None and kind == 0 else list(range(shape.head_size))
        channels = order[sub_vector * preset.sub_vector_size : (sub_vector + 1) * preset.sub_vector_size]
        return Problem(
            rows[kind, :, head][:, channels].astype(np.float32),
            weights[kind, :, head],
            preset.num_centroids,
            np.random.SeedSequence([how.seed, layer, kind, head, sub_vector]),
        )

    places = list(product(range(2), range(shape.num_kv_heads), range(num_sub_vectors)))
    learned: list[np.ndarray] = []
    for centroids in solve([partial(problem, *place) for place in places], how.backend):
        learned.append(centroids.astype(np.float16))
        advance()
    return np.stack(learned).reshape(2, shape.num_kv_heads, num_sub_vectors, preset.num_centroids, -1)


def token_weights(norms: np.ndarray) -> np.ndarray:
    """How much each row counts, from the norms of its gradient (AnTKV, equation 2); 1 on average.

    No token is worth nothing: another text may mind it, and k-means needs weights that float32 can add up. A head whose
    gradients all vanish falls back to equal weights.

    Args:
        norms: (2, num_tokens, num_kv_heads) float32.

    Returns:
        Same shape, float32.
    """
    raw = norms.astype(np.float64) ** GRADIENT_POWER
    mean = raw.mean(axis=1, keepdims=True)
    relative = np.divide(raw, mean, out=np.ones_like(raw), where=mean > 0)
    return np.maximum(relative, _MIN_WEIGHT).astype(np.float32)
