"""The rows and sink channels of a calibration text, for those methods of the literature that learn from one."""

import numpy as np
import torch
from transformers import PreTrainedModel

from research.literature.query_moments import query_moments
from research.literature.request import Sample
from vllm_antkv.offline.capture_attention import Attended, attention_watched, layer_of
from vllm_antkv.offline.hidden import loss_of
from vllm_antkv.offline.sinks import SinkChannels, find_channels, peak_ratios
from vllm_antkv.offline.traits import layer_traits, rotary_tables
from vllm_antkv.ops.rope import RotaryTable, rotated_gradient, unrotate

#: Tokens learned from, unless more are asked for: what KVQuant's channel ranges need, and 2 GB of rows for an 8B model.
MAX_TOKENS = 8192


class _Layer:
    """What is remembered of a layer, a window at a time.

    rotary: what turns its keys.
    window: tokens that a query sees, or None.
    """

    def __init__(self, rotary: RotaryTable, window: int | None) -> None:
        self.rotary, self.window = rotary, window
        self.plain_keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.moments: list[torch.Tensor] = []
        self.key_fisher: list[torch.Tensor] = []
        self.value_fisher: list[torch.Tensor] = []
        #: Of the window in hand, as attention was given them.
        self.handed: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(self, attended: Attended) -> None:
        """Its rows, and how its queries look at them."""
        key, value, query = (_rows(part) for part in (attended.key, attended.value, attended.query))
        positions = torch.arange(len(key), device=key.device)
        self.plain_keys.append(unrotate(key, positions, self.rotary).cpu())
        self.values.append(value.cpu())
        self.moments.append(query_moments(query, key.shape[1], self.rotary, self.window).cpu())
        self.handed = attended.key, attended.value

    def take_gradients(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Of the loss by what attention was given."""
        key, value = _rows(key), _rows(value)
        positions = torch.arange(len(key), device=key.device)
        self.key_fisher.append(rotated_gradient(key, positions, self.rotary).square().bfloat16().cpu())
        self.value_fisher.append(value.square().bfloat16().cpu())


def take_sample(
    model: PreTrainedModel,
    windows: torch.Tensor,
    text: str,
    max_tokens: int = MAX_TOKENS,
    gradients: bool = False,
) -> Sample:
    """Run the first windows of a text, `max_tokens` of them at most but one window at least.

    Args:
        model: the model, in full precision.
        windows: (num_windows, context) int64.
        text: where they come from, for the settings of a figure.
        max_tokens: tokens learned from, at most.
        gradients: whether `key_fisher` and `value_fisher` are taken, too.
    """
    num_tokens = windows.shape[1]
    chosen = windows[: max(1, max_tokens // num_tokens)].to(model.device)
    traits, rotaries = layer_traits(model), rotary_tables(model, num_tokens)
    layers = {
        layer: _Layer(rotary, own.window)
        for layer, (own, rotary) in enumerate(zip(traits, rotaries, strict=True))
        if own.source is None
    }
    with torch.set_grad_enabled(gradients):
        for window in chosen:
            _run(model, window, layers)
    ratios = np.stack([peak_ratios(model, window) for window in chosen])
    found = find_channels(ratios)
    if found is None:
        # No channel dwarfs the others: the one that comes closest.
        layer, channel = np.unravel_index(np.median(ratios, axis=0).argmax(), ratios.shape[1:])
        found = SinkChannels(int(layer), (int(channel),))
    taken = layers.values()
    return Sample(
        text=text,
        plain_key=[_together(layer.plain_keys) for layer in taken],
        value=[_together(layer.values) for layer in taken],
        query_moments=[torch.stack(layer.moments).mean(0) for layer in taken],
        key_fisher=[_together(layer.key_fisher) for layer in taken if gradients],
        value_fisher=[_together(layer.value_fisher) for layer in taken if gradients],
        sink_layer=found.layer,
        sink_channels=found.channels,
    )


def _run(model: PreTrainedModel, window: torch.Tensor, layers: dict[int, _Layer]) -> None:
    """One window, with its gradients where they are enabled."""

    def watch(attended: Attended) -> None:
        # A layer that attends to the K and V of another has none of its own.
        if (layer := layers.get(layer_of(attended.module))) is not None:
            layer.take(attended)

    with attention_watched(model, watch):
        if not torch.is_grad_enabled():
            model.get_decoder()(window[None], use_cache=False)
            return
        loss = loss_of(model, window)
    handed = [rows for layer in layers.values() for rows in (layer.handed or ())]
    gradients = torch.autograd.grad(loss, handed)
    for layer, key, value in zip(layers.values(), gradients[0::2], gradients[1::2], strict=True):
        layer.take_gradients(key, value)
        layer.handed = None


def _together(rows: list[torch.Tensor]) -> torch.Tensor:
    """Rows of all windows, which are not held twice for more than a layer."""
    together = torch.stack(rows)
    rows.clear()
    return together


def _rows(handed: torch.Tensor) -> torch.Tensor:
    """(1, num_heads, num_tokens, head_size) -> (num_tokens, num_heads, head_size) float32."""
    return handed.detach()[0].transpose(0, 1).float()
