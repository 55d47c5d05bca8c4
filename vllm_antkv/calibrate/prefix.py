"""Training the intact prefix: K and V of a prompt's first tokens, after the centroids (IntactKV, section 3.2).

The rows of the prefix start as the model's own and are trained so that hidden states of the model that attends through
codes come close to those of the model itself. The loss of a window is the mean squared error of the hidden states that
each layer hands on, summed over the layers, at all tokens whose outputs anybody reads: from the prefix's last one on.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import mse_loss
from transformers import PreTrainedModel

from vllm_antkv.calibrate.training import TRAINING, Schedule, split, train
from vllm_antkv.codebook import Codebook
from vllm_antkv.codebook.prefix import TrainedPrefix
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.vector_quantiser import VectorQuantiser

_Result = TypeVar("_Result")
#: Of the paper.
STEPS = 160
_LEARNING_RATE = 2e-4


def train_prefix(
    model: PreTrainedModel, codebook: Codebook, token_ids: tuple[int, ...], windows: torch.Tensor, schedule: Schedule
) -> tuple[TrainedPrefix | None, tuple[float, float]]:
    """Train the rows of a prefix for one codebook.

    Args:
        model: frozen, in evaluation mode.
        codebook: with its final centroids.
        token_ids: of the prefix.
        windows: (num_windows, seq_len) int64, two at least; each starts with the prefix.
        schedule: see `Schedule`.

    Returns:
        The prefix, or None where training did not help on the windows held out; and the loss there before and after.
    """
    held_out, trained = split(windows)
    k, v = (nn.Parameter(rows) for rows in _own_rows(model, token_ids))
    config = TRAINING.model_copy(update={"prefix": max(TRAINING.prefix, len(token_ids))})
    preset, prefix = codebook.preset, TrainedPrefix(token_ids, k, v)
    method = Method(
        preset.name,
        preset.nominal_bits,
        config,
        VectorQuantiser(codebook),
        trained_prefix=prefix,
        k_scale=codebook.k_scale,
    )

    def with_loss(batch: torch.Tensor, use: Callable[[torch.Tensor], _Result]) -> _Result:
        with torch.no_grad():
            expected = _hidden_states(model, batch, len(token_ids) - 1)
        # Layers that are recomputed on the way back must attend through the codes again.
        with quantised_past(model, method, batch.shape[1]):
            found = _hidden_states(model, batch, len(token_ids) - 1)
            return use(torch.stack(list(map(mse_loss, found, expected))).sum())

    @torch.no_grad()
    def loss_held_out() -> float:
        losses = [with_loss(window, torch.Tensor.item) for window in held_out[:, None].to(model.device)]
        return float(sum(losses) / len(losses))

    before = loss_held_out()
    optimiser = torch.optim.AdamW([k, v], lr=_LEARNING_RATE)
    train({"k": k, "v": v}, optimiser, lambda batch: with_loss(batch, torch.Tensor.backward), trained, schedule)
    after = loss_held_out()
    if after >= before:
        return None, (before, before)
    return TrainedPrefix(token_ids, k.detach().cpu(), v.detach().cpu()), (before, after)


@torch.no_grad()
def _own_rows(model: PreTrainedModel, token_ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """K after RoPE and V as the model computes them: each (num_layers, P, num_kv_heads, head_size) float32."""
    ids = torch.tensor([token_ids], device=model.device)
    layers = model.get_decoder()(ids, use_cache=True).past_key_values.layers
    k, v = ([getattr(layer, name)[0].transpose(0, 1) for layer in layers] for name in ("keys", "values"))
    return torch.stack(k).float().contiguous(), torch.stack(v).float().contiguous()


def _hidden_states(model: PreTrainedModel, batch: torch.Tensor, first: int) -> list[torch.Tensor]:
    """What every layer hands on from token `first` on: each (num_windows, seq_len - first, hidden_size) float32."""
    states = model.get_decoder()(batch, use_cache=False, output_hidden_states=True).hidden_states
    return [state[:, first:].float() for state in states[1:]]
