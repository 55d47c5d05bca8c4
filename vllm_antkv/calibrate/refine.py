"""Centroids trained end to end, after k-means: the model attends through the codes, and centroids follow the gradient.

k-means brings centroids close to K and V, but what counts is what the model says. The loss of a window is the
Kullback-Leibler divergence between the next-token distributions of the model with its own attention and with attention
through the codes. A code stays the index of the nearest centroid; the gradient moves the centroids (and, through them,
what later layers store), not the choice. Serving costs nothing more: a codebook is a codebook.

Anchors and sinks are off meanwhile: which tokens they are is a choice as well. Recency and prefix are the server's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.attention import quantised_past
from vllm_antkv.evaluate.methods.base import Method
from vllm_antkv.ops.reference import decode, encode
from vllm_antkv.ops.rope import RotaryTable, rotate, unrotate
from vllm_antkv.presets import Preset

#: Tokens in a step.
_TOKENS_PER_STEP = 2048
#: The largest step, in standard deviations of the centroids.
_STEP_SIZE = 0.01
_WARM_UP_STEPS = 10
_BETAS = (0.9, 0.99)
#: One window in so many is not trained on, and judges.
_HELD_OUT_EVERY = 16
#: Steps between two points from which a killed run goes on.
_STEPS_PER_SAVE = 20


@dataclass
class Progress:
    """Everything a later run needs to go on as if nothing had happened.

    step: steps done. tensors: centroids and moments of the optimiser, by name; empty before the first step.
    """

    step: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Refined:
    """Centroids as they came or, where training helped on the windows held out, as they were trained.

    k, v: (num_layers, num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) float16.
    divergence: on the windows held out, before and after, in nats per token.
    """

    k: torch.Tensor
    v: torch.Tensor
    divergence: tuple[float, float]


def refine(
    model: PreTrainedModel,
    preset: Preset,
    k: torch.Tensor,
    v: torch.Tensor,
    k_order: list[int] | None,
    windows: torch.Tensor,
    steps: int,
    seed: int,
    progress: Progress,
    save: Callable[[Progress], None],
    advance: Callable[[int], object],
) -> Refined:
    """Train the centroids of one preset.

    Args:
        model: frozen, in evaluation mode.
        k, v: centroids from k-means, shapes as in `Refined`.
        k_order: as in the codebook's header.
        windows: (num_windows, seq_len) int64 of calibration text, two at least.
        steps: of about 2,048 tokens each.
        seed: draws the windows of each step.
        progress: where an earlier run stopped.
        save: called now and then with what to keep.
        advance: called with the number of steps done since the last call.
    """
    held_out, trained = _split(windows)
    through_codes = _through_codes(preset, _Centroids(k, v, k_order).to(model.device))
    centroids = through_codes.quantiser
    assert isinstance(centroids, _Centroids)
    before = _mean_divergence(model, through_codes, held_out)
    optimiser = torch.optim.Adam([{"params": [p]} for p in (centroids.k, centroids.v)], betas=_BETAS)
    spreads = [centroids.k.std().item(), centroids.v.std().item()]
    _restore(progress, centroids, optimiser)
    advance(progress.step)
    for step in range(progress.step, steps):
        for group, spread in zip(optimiser.param_groups, spreads, strict=True):
            group["lr"] = spread * _step_size(step, steps)
        batch = trained[_drawn(len(trained), windows.shape[1], seed, step)].to(model.device)
        optimiser.zero_grad()
        expected = _own_logs(model, batch)
        # Layers that are recomputed on the way back must attend through the codes again.
        with quantised_past(model, through_codes, batch.shape[1]):
            _divergence(expected, model, batch).backward()
        optimiser.step()
        advance(1)
        if (step + 1) % _STEPS_PER_SAVE == 0 or step + 1 == steps:
            save(_kept(step + 1, centroids, optimiser))
    trained_k, trained_v = (p.detach().half().cpu() for p in (centroids.k, centroids.v))
    rounded = _Centroids(trained_k, trained_v, k_order).to(model.device)
    after = _mean_divergence(model, _through_codes(preset, rounded), held_out)
    if after >= before:
        return Refined(k, v, (before, before))
    return Refined(trained_k, trained_v, (before, after))


class _Centroids(nn.Module):
    """See `Quantiser`: what `VectorQuantiser` does, with centroids that a gradient reaches."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, k_order: list[int] | None) -> None:
        super().__init__()
        self._k_order = list(range(k.shape[2] * k.shape[4])) if k_order is None else k_order
        self._k_places = sorted(range(len(self._k_order)), key=self._k_order.__getitem__)
        self.k = nn.Parameter(k.float())
        self.v = nn.Parameter(v.float())

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        positions = torch.arange(key.shape[1], device=key.device)
        plain_key = _nearest(unrotate(key, positions, rotary)[..., self._k_order], self.k[layer])
        return rotate(plain_key[..., self._k_places], positions, rotary), _nearest(value, self.v[layer])


def _nearest(rows: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    codes = encode(rows.detach().flatten(0, 1), centroids.detach())
    return decode(codes, centroids).unflatten(0, rows.shape[:2])


def _through_codes(preset: Preset, centroids: _Centroids) -> Method:
    config = AntKVConfig(anchor_share=0.0, sinks=False)
    return Method(name=preset.name, nominal_bits=preset.nominal_bits, config=config, quantiser=centroids)


def _split(windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows that judge, and windows that are trained on."""
    num_held_out = max(1, len(windows) // _HELD_OUT_EVERY)
    return windows[:num_held_out], windows[num_held_out:]


def _drawn(num_windows: int, seq_len: int, seed: int, step: int) -> torch.Tensor:
    """Indices of a step's windows: every window comes once before any comes again."""
    count = max(1, _TOKENS_PER_STEP // seq_len)
    indices = []
    for position in range(step * count, (step + 1) * count):
        turn, place = divmod(position, num_windows)
        generator = torch.Generator().manual_seed(seed + turn)
        indices.append(torch.randperm(num_windows, generator=generator)[place])
    return torch.stack(indices)


def _step_size(step: int, steps: int) -> float:
    """In standard deviations of the centroids: soon at its largest, at last 0."""
    return _STEP_SIZE * min(1.0, (step + 1) / _WARM_UP_STEPS) * (1 + math.cos(math.pi * step / steps)) / 2


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


def _kept(step: int, centroids: _Centroids, optimiser: torch.optim.Adam) -> Progress:
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in centroids.named_parameters():
        state = optimiser.state[parameter]
        tensors |= {name: parameter.detach(), f"{name}.mean": state["exp_avg"], f"{name}.square": state["exp_avg_sq"]}
    return Progress(step, {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})


def _restore(progress: Progress, centroids: _Centroids, optimiser: torch.optim.Adam) -> None:
    if not progress.step:
        return
    with torch.no_grad():
        for name, parameter in centroids.named_parameters():
            parameter.copy_(progress.tensors[name])
            optimiser.state[parameter] = {
                "step": torch.tensor(float(progress.step)),
                "exp_avg": progress.tensors[f"{name}.mean"].to(parameter),
                "exp_avg_sq": progress.tensors[f"{name}.square"].to(parameter),
            }
