"""Centroids trained end to end, after k-means: the model attends through the codes, and centroids follow the gradient.

So do the factors by which each query head corrects its logits for what keys lose (`codebook.KeyErrors.gain`).

k-means brings centroids close to K and V, but what counts is what the model says. The loss of a window is the
Kullback-Leibler divergence between the next-token distributions of the model with its own attention and with attention
through the codes. A code stays the index of the nearest centroid; the gradient moves the centroids (and, through them,
what later layers store), not the choice. Serving costs nothing more: a codebook is a codebook.
"""

import math
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from vllm_antkv.calibrate.training import TRAINING, Schedule, split, train
from vllm_antkv.codebook import Codebook
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.vector_quantiser import VectorQuantiser

#: The largest step, in standard deviations of the centroids of a layer, and of the factors of the logits' correction.
_STEP_SIZE = 0.01
_GAIN_STEP_SIZE = 0.02
_WARM_UP_STEPS = 10
_BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class Refined:
    """A codebook as it came or, where training helped on the windows held out, with trained centroids.

    divergence: on the windows held out, before and after, in nats per token.
    """

    codebook: Codebook
    divergence: tuple[float, float]


def refine(model: PreTrainedModel, codebook: Codebook, windows: torch.Tensor, schedule: Schedule) -> Refined:
    """Train the centroids of one preset.

    Args:
        model: frozen, in evaluation mode.
        codebook: with centroids from k-means.
        windows: (num_windows, seq_len) int64 of calibration text, two at least.
        schedule: see `Schedule`.
    """
    held_out, trained = split(windows)
    before = _mean_divergence(model, _through_codes(codebook), held_out)
    k, v = (_parameters(layers, model.device) for layers in (codebook.k, codebook.v))
    gain = None if codebook.key_errors is None else torch.nn.Parameter(codebook.key_errors.gain.clone())
    through_codes = _through_codes(replace(codebook, k=k, v=v, k_bias_gain=gain))

    def backward(batch: torch.Tensor) -> None:
        expected = _own_logs(model, batch)
        # Layers that are recomputed on the way back must attend through the codes again.
        with quantised_past(model, through_codes, batch.shape[1]):
            _divergence(expected, model, batch).backward()

    groups = [{"params": [layer], "lr": _STEP_SIZE * layer.detach().std().item()} for layer in (*k, *v)]
    tensors = {f"{kind}{index}": layer for kind, layers in (("k", k), ("v", v)) for index, layer in enumerate(layers)}
    if gain is not None:
        groups.append({"params": [gain], "lr": _GAIN_STEP_SIZE})
        tensors["gain"] = gain
    optimiser = torch.optim.Adam(groups, betas=_BETAS)
    train(tensors, optimiser, backward, trained, schedule, lambda step: _rate(step, schedule.steps))
    trained_gain = None if gain is None else gain.detach()
    refined = replace(codebook, k=_centroids(k), v=_centroids(v), k_bias_gain=trained_gain)
    after = _mean_divergence(model, _through_codes(refined), held_out)
    return Refined(codebook, (before, before)) if after >= before else Refined(refined, (before, after))


def _parameters(layers: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.nn.Parameter(layer.to(device, torch.float32)) for layer in layers)


def _centroids(layers: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(layer.detach().half().cpu() for layer in layers)


def _through_codes(codebook: Codebook) -> Method:
    preset = codebook.preset
    return Method(
        preset.name,
        preset.nominal_bits,
        TRAINING,
        VectorQuantiser(codebook),
        key_errors=codebook.key_errors,
        k_scale=codebook.k_scale,
    )


def _rate(step: int, steps: int) -> float:
    """Soon 1, at last 0."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS) * (1 + math.cos(math.pi * step / steps)) / 2


@torch.no_grad()
def _own_logs(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the model with its own attention: (num_windows, seq_len, vocab_size) float32."""
    return model(batch, use_cache=False).logits.float().log_softmax(-1)


def _divergence(expected: torch.Tensor, model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence from `expected`, mean over the tokens of (num_windows, seq_len), in nats."""
    found = model(batch, use_cache=False).logits.float().log_softmax(-1)
    return (expected.exp() * (expected - found)).sum(-1).mean()


@torch.no_grad()
def _mean_divergence(model: PreTrainedModel, method: Method, windows: torch.Tensor) -> float:
    losses = []
    for window in windows[:, None].to(model.device):
        expected = _own_logs(model, window)
        with quantised_past(model, method, windows.shape[1]):
            losses.append(_divergence(expected, model, window).item())
    return sum(losses) / len(losses)
