"""Training the intact prefix: K and V of a prompt's first tokens, after the centroids (IntactKV, section 3.2).

The rows of the prefix start as the model's own and are trained so that the outputs of the layers of the model that
attends through codes come close to those of the model itself. The loss of a window is the mean squared error of the
hidden state after every decoder layer, summed over the layers, at all tokens whose outputs anybody reads: from the
prefix's last one on.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from transformers import PreTrainedModel

from vllm_antkv.calibrate.training import TRAINING, Schedule, split, train
from vllm_antkv.codebook import Codebook
from vllm_antkv.codebook.prefix import TrainedPrefix
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.vector_quantiser import VectorQuantiser

#: Of the paper.
STEPS = 160
_LEARNING_RATE = 2e-4


@dataclass(frozen=True)
class PrefixTraining:
    """What came of it.

    prefix: None where training did not help on the windows held out; the model's own rows then stay in place.
    loss: on the windows held out, before and after.
    """

    prefix: TrainedPrefix | None
    loss: tuple[float, float]


def train_prefix(
    model: PreTrainedModel, codebook: Codebook, token_ids: tuple[int, ...], windows: torch.Tensor, schedule: Schedule
) -> PrefixTraining:
    """Train the rows of a prefix for one codebook.

    Args:
        model: frozen, in evaluation mode.
        codebook: with its final centroids.
        token_ids: of the prefix.
        windows: (num_windows, seq_len) int64, two at least; each starts with the prefix.
        schedule: see `Schedule`.
    """
    held_out, trained = split(windows)
    k, v = (nn.Parameter(rows) for rows in _own_rows(model, token_ids))
    prefix = TrainedPrefix(token_ids, k, v)
    config = TRAINING.model_copy(update={"prefix": max(TRAINING.prefix, len(token_ids))})
    preset = codebook.preset
    method = Method(preset.name, preset.nominal_bits, config, VectorQuantiser(codebook), trained_prefix=prefix)
    before = _mean_loss(model, method, held_out)

    def backward(batch: torch.Tensor) -> None:
        with torch.no_grad():
            expected = _layer_outputs(model, batch)
        # Layers that are recomputed on the way back must attend through the codes again.
        with quantised_past(model, method, batch.shape[1]):
            _loss(model, batch, expected, prefix).backward()

    train({"k": k, "v": v}, torch.optim.AdamW([k, v], lr=_LEARNING_RATE), backward, trained, schedule)
    after = _mean_loss(model, method, held_out)
    if after >= before:
        return PrefixTraining(None, (before, before))
    return PrefixTraining(TrainedPrefix(token_ids, k.detach().cpu(), v.detach().cpu()), (before, after))


@torch.no_grad()
def _own_rows(model: PreTrainedModel, token_ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """K after RoPE and V as the model computes them: each (num_layers, P, num_kv_heads, head_size) float32."""
    ids = torch.tensor([token_ids], device=model.device)
    layers = model.get_decoder()(ids, use_cache=True).past_key_values.layers
    keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in layers])
    values = torch.stack([layer.values[0].transpose(0, 1) for layer in layers])
    return keys.float().contiguous(), values.float().contiguous()


def _loss(
    model: PreTrainedModel, batch: torch.Tensor, expected: list[torch.Tensor], prefix: TrainedPrefix
) -> torch.Tensor:
    first = len(prefix.token_ids) - 1
    found = _layer_outputs(model, batch)
    errors = [mse_loss(f[:, first:], e[:, first:]) for f, e in zip(found, expected, strict=True)]
    return torch.stack(errors).sum()


@torch.no_grad()
def _mean_loss(model: PreTrainedModel, method: Method, windows: torch.Tensor) -> float:
    assert method.trained_prefix is not None
    losses = []
    for window in windows[:, None].to(model.device):
        expected = _layer_outputs(model, window)
        with quantised_past(model, method, windows.shape[1]):
            losses.append(_loss(model, window, expected, method.trained_prefix).item())
    return sum(losses) / len(losses)


def _layer_outputs(model: PreTrainedModel, batch: torch.Tensor) -> list[torch.Tensor]:
    """The hidden state after every decoder layer: each (num_windows, seq_len, hidden_size) float32."""
    with _outputs_of(decoder_layers(model)) as outputs:
        model.get_decoder()(batch, use_cache=False)
    return outputs


@contextmanager
def _outputs_of(layers: nn.ModuleList) -> Iterator[list[torch.Tensor]]:
    outputs: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).float())

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(hook).remove)
        yield outputs
