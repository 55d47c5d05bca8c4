"""From the captured activations of a layer to its centroids."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_antkv.calibrate.capture import CaptureFiles
from vllm_antkv.offline.kmeans import learn_centroids
from vllm_antkv.ops.fp8_tables import served
from vllm_antkv.ops.reference import decode, encode
from vllm_antkv.ops.rope import RotaryTable, pair_sums
from vllm_antkv.presets import Preset

#: A token's weight is its gradient's norm to this power. AnTKV leaves it open; `docs/calibration.md` has the figures.
GRADIENT_POWER = 1
#: Least weight of a token, relative to the mean.
_MIN_WEIGHT = 1e-4
#: Four times as many gave SmolLM2 no smaller divergence.
_TOKENS_OF_ERRORS = 1_024


@dataclass(frozen=True)
class Clustering:
    """How layers are clustered.

    k_order: channels of K in the order in which sub-vectors take them; None: as the model has them.
    k_scale: (num_layers, num_kv_heads, head_size), by which K is scaled; None: every channel counts alike.
    weighted: by gradients, or every token alike.
    seed: of all layers.
    device: where k-means runs.
    """

    preset: Preset
    k_order: list[int] | None
    k_scale: torch.Tensor | None
    weighted: bool
    seed: int
    device: torch.device


def learn_layer(
    files: CaptureFiles, layer: int, kept: np.ndarray, how: Clustering, advance: Callable[[int], object]
) -> np.ndarray:
    """Learn the centroids of one layer.

    Args:
        kept: (num_windows, seq_len) bool, the tokens that are clustered.
        how: see `Clustering`.
        advance: called with the number of sub-vectors that are done since the last call.

    Returns:
        (2, num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) float16, K first.
    """
    preset, shape = how.preset, files.shape
    num_sub_vectors = preset.num_sub_vectors(shape.head_size)
    learned = []
    for kind, order in enumerate((how.k_order, None)):
        rows = torch.from_numpy(files.rows(layer)[kind, kept]).to(how.device, torch.float32)
        if kind == 0 and how.k_scale is not None:
            rows *= how.k_scale[layer].to(rows)
        if order is not None:
            rows = rows[..., order]
        norms = files.norms(layer)[kind, kept] if how.weighted else np.ones(rows.shape[:2], np.float32)
        weights = torch.from_numpy(token_weights(norms)).to(how.device)
        # A problem for each sub-vector of each head.
        points = rows.unflatten(-1, (num_sub_vectors, -1)).flatten(1, 2).transpose(0, 1)
        weights = weights.T.repeat_interleave(num_sub_vectors, 0)
        (seed,) = np.random.SeedSequence([how.seed, layer, kind]).generate_state(1, np.uint64)
        centroids = learn_centroids(points, weights, preset.num_centroids, int(seed >> 1))
        learned.append(centroids.unflatten(0, (shape.num_kv_heads, num_sub_vectors)).half().cpu())
        advance(len(points))
    return torch.stack(learned).numpy()


def key_errors(
    files: CaptureFiles, layer: int, kept: np.ndarray, centroids: np.ndarray, how: Clustering, rotary: RotaryTable
) -> torch.Tensor:
    """What the codes of a layer lose of K, see `Codebook.k_errors`: means over the tokens that are clustered.

    Args:
        centroids: as from `learn_layer`.
        how: as in `learn_layer`. rotary: what turns the layer's K.

    Returns:
        (num_kv_heads, head_size) float32.
    """
    rows = files.rows(layer)[0, kept]
    rows = torch.from_numpy(rows[:: max(len(rows) // _TOKENS_OF_ERRORS, 1)].astype(np.float32))
    if how.k_scale is not None:
        rows *= how.k_scale[layer]
    order = list(range(rows.shape[-1])) if how.k_order is None else how.k_order
    table = served(torch.from_numpy(centroids[0])).float()
    ordered = rows[..., order]
    squares = torch.empty(rows.shape[1:])
    squares[:, order] = (ordered - decode(encode(ordered, table), table)).square().mean(0)
    sums = pair_sums(squares, rotary)
    sums[:, : rotary.rotary_dim] /= 2
    return sums


def token_weights(norms: np.ndarray) -> np.ndarray:
    """How much each row counts, from the norms of its gradient (AnTKV, equation 2); 1 on average.

    No token is worth nothing: another text may mind it, and k-means needs weights that float32 can add up. A head whose
    gradients all vanish falls back to equal weights.

    Args:
        norms: (num_tokens, num_kv_heads) float32.

    Returns:
        Same shape, float32.
    """
    raw = norms.astype(np.float64) ** GRADIENT_POWER
    mean = raw.mean(axis=0, keepdims=True)
    relative = np.divide(raw, mean, out=np.ones_like(raw), where=mean > 0)
    return np.maximum(relative, _MIN_WEIGHT).astype(np.float32)
