"""The rows and sink channels of a calibration text, for those methods of the literature that learn from one."""

import numpy as np
import torch
from transformers import PreTrainedModel

from research.literature.request import Sample
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.sinks import SinkChannels, find_channels, peak_ratios
from vllm_antkv.ops.rope import RotaryTable, unrotate

#: Tokens learned from, at most: what KVQuant's channel ranges need, and 3 GB of rows for an 8B model.
MAX_TOKENS = 8192


class _Recorder:
    """A quantiser that loses nothing and remembers what it was given: K after RoPE, K before it, V."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[list[torch.Tensor], ...]] = {}

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        plain = unrotate(key, torch.arange(key.shape[1], device=key.device), rotary)
        for taken, rows in zip(self.rows.setdefault(layer, ([], [], [])), (key, plain, value), strict=True):
            taken.append(rows.cpu())
        return key.clone(), value.clone()


@torch.inference_mode()
def take_sample(model: PreTrainedModel, windows: torch.Tensor, text: str) -> Sample:
    """Run the first windows of a text, `MAX_TOKENS` of them at most but one window at least.

    Args:
        model: the model, in full precision.
        windows: (num_windows, context) int64.
        text: where they come from, for the settings of a figure.
    """
    num_tokens = windows.shape[1]
    chosen = windows[: max(1, MAX_TOKENS // num_tokens)].to(model.device)
    recorder = _Recorder()
    nothing_kept = AntKVConfig(anchor_share=0.0, sinks=False, prefix=0, recency="none")
    with quantised_past(model, Method("recorder", 16.0, nothing_kept, recorder), num_tokens):
        for window in chosen:
            model.get_decoder()(window[None], use_cache=False)
    ratios = np.stack([peak_ratios(model, window) for window in chosen])
    found = find_channels(ratios)
    if found is None:
        # No channel dwarfs the others: the one that comes closest.
        layer, channel = np.unravel_index(np.median(ratios, axis=0).argmax(), ratios.shape[1:])
        found = SinkChannels(int(layer), (int(channel),))
    key, plain_key, value = (
        [torch.cat(recorder.rows[layer][kind]) for layer in sorted(recorder.rows)] for kind in range(3)
    )
    return Sample(
        text=text,
        key=key,
        plain_key=plain_key,
        value=value,
        sink_layer=found.layer,
        sink_channels=found.channels,
    )
