"""Captures what the cache would hold, and how much the loss minds its error (AnTKV, section 4.2, LinearWithAct).

Where attention is handed K and V, they are taken on the way forward, and dL/dK, dL/dV on the way back, where L is the
language-model loss of a window. K is turned back by the layer's own table: rows are coded before RoPE (section 4.1),
and after a key norm where the model has one. Of a gradient only its norm per token and head is kept, of queries their
mean squares. Everything is written straight to memory-mapped files, so memory holds one window at a time.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from transformers import PreTrainedModel

from vllm_antkv.calibrate.key_scales import query_energy
from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.capture_attention import Attended, attention_watched, layer_of
from vllm_antkv.offline.hidden import captured_hidden, loss_of
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.sinks import SinkChannels
from vllm_antkv.ops.rope import RotaryTable, rotated_gradient, unrotate

#: Receives the index of a layer, 0 for K or 1 for V, and the rows or norms.
Receiver = Callable[[int, int, torch.Tensor], None]
#: Receives the index of a layer and its `query_energy`.
OnQueries = Callable[[int, torch.Tensor], None]
#: Captures a window, (seq_len,) int64 on the CPU, as the one of this index.
CaptureWindow = Callable[[torch.Tensor, int], None]


@dataclass(frozen=True)
class CaptureShape:
    """Sizes of everything captured."""

    num_layers: int
    num_windows: int
    seq_len: int
    num_kv_heads: int
    head_size: int
    num_sink_channels: int

    @property
    def num_bytes(self) -> int:
        """Bytes on disk: K and V in float16, one float32 norm per token and head of each, sink channels, queries."""
        tokens = self.num_windows * self.seq_len
        heads = self.num_layers * self.num_kv_heads
        per_token = heads * 2 * (2 * self.head_size + 4) + 4 * self.num_sink_channels
        return tokens * per_token + self.num_windows * heads * self.head_size * 4


class CaptureFiles:
    """The captured activations of a model on disk, as memory-mapped arrays.

    Everything is indexed by window, so a window that is captured again overwrites itself.
    """

    def __init__(self, folder: Path, shape: CaptureShape) -> None:
        self.shape = shape
        self._folder = folder
        self._maps: dict[str, np.memmap] = {}

    def rows(self, layer: int) -> np.memmap:
        """K (index 0) and V (1) of a layer: (2, num_windows, seq_len, num_kv_heads, head_size) float16."""
        return self._open(f"rows-{layer:03d}", np.float16, self._per_layer + (self.shape.head_size,))

    def norms(self, layer: int) -> np.memmap:
        """What rows of K (index 0) and V (1) weigh: (2, num_windows, seq_len, num_kv_heads) float32.

        Norms of dL/dK and dL/dV or, where no gradient flows, what stands for them (`engine`).
        """
        return self._open(f"norms-{layer:03d}", np.float32, self._per_layer)

    def sink_values(self) -> np.memmap:
        """|hidden| of the sink channels: (num_windows, seq_len, num_sink_channels) float32."""
        shape = self.shape
        return self._open("sinks", np.float32, (shape.num_windows, shape.seq_len, shape.num_sink_channels))

    def queries(self) -> np.memmap:
        """As `key_scales.query_energy`: (num_windows, num_layers, num_kv_heads, head_size) float32."""
        shape = self.shape
        per_window = (shape.num_layers, shape.num_kv_heads, shape.head_size)
        return self._open("queries", np.float32, (shape.num_windows, *per_window))

    def num_bytes_taken(self) -> int:
        """Bytes of disk that an earlier run has taken already."""
        return sum(512 * path.stat().st_blocks for path in self._folder.glob("*.bin"))

    def flush(self) -> None:
        """Write everything captured so far to disk."""
        for array in self._maps.values():
            array.flush()

    @property
    def _per_layer(self) -> tuple[int, ...]:
        return (2, self.shape.num_windows, self.shape.seq_len, self.shape.num_kv_heads)

    def _open(self, name: str, dtype: Any, shape: tuple[int, ...]) -> np.memmap:
        if name not in self._maps:
            path = self._folder / f"{name}.bin"
            # Writing to a mapped file for which there is no room kills the process, so its room is taken first.
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, math.prod(shape) * np.dtype(dtype).itemsize)
            self._maps[name] = np.memmap(path, dtype=dtype, mode="r+", shape=shape)
        return self._maps[name]


@contextmanager
def captured(
    model: PreTrainedModel,
    rotaries: Sequence[RotaryTable],
    on_rows: Receiver,
    on_norms: Receiver,
    on_queries: OnQueries,
) -> Iterator[None]:
    """While active, every forward hands its K and V to `on_rows` and every backward the gradients' norms to `on_norms`.

    Args:
        rotaries: what turns the K of each layer.
        on_rows: receives rows (seq_len, num_kv_heads, head_size) float32, K before RoPE.
        on_norms: receives norms (seq_len, num_kv_heads) float32: ||dL/dK_j|| or ||dL/dV_j|| per head.
        on_queries: receives the index of a layer and its `query_energy`.
    """

    def watch(attended: Attended) -> None:
        layer, key, value = layer_of(attended.module), attended.key, attended.value
        positions = torch.arange(key.shape[2], device=key.device)
        rotary = rotaries[layer]

        def plain(rows: torch.Tensor) -> torch.Tensor:
            return rows.detach()[0].transpose(0, 1).float()

        def on_key_gradient(gradient: torch.Tensor) -> None:
            on_norms(layer, 0, rotated_gradient(plain(gradient), positions, rotary).norm(dim=-1))

        on_rows(layer, 0, unrotate(plain(key), positions, rotary))
        on_rows(layer, 1, plain(value))
        on_queries(layer, query_energy(plain(attended.query), key.shape[1], rotary))
        if key.requires_grad:
            key.register_hook(on_key_gradient)
            value.register_hook(lambda gradient: on_norms(layer, 1, plain(gradient).norm(dim=-1)))

    with attention_watched(model, watch):
        yield


@contextmanager
def checkpointed(model: nn.Module, active: bool) -> Iterator[None]:
    """Recompute each decoder layer in the backward pass instead of keeping its activations."""
    if not active:
        yield
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    layers = decoder_layers(model)
    # Transformers checkpoints a layer only while it trains. Setting the flag of the layer itself, not of the modules
    # inside it, leaves every dropout off.
    for layer in layers:
        layer.training = True
    try:
        # A layer that is recomputed to its end can put away what it has read for it (`models.load_model`).
        with set_checkpoint_early_stop(False):
            yield
    finally:
        for layer in layers:
            layer.training = False
        model.gradient_checkpointing_disable()  # type: ignore[operator]


@dataclass(frozen=True)
class Capture:
    """What is taken of every window, and where it goes.

    rotaries: what turns the K of each layer.
    weighted: what tokens weigh, too.
    sinks: the channels that show sinks; None where there are none.
    """

    rotaries: Sequence[RotaryTable]
    files: CaptureFiles
    weighted: bool = True
    sinks: SinkChannels | None = None

    def write_rows(self, index: int, layer: int, kind: int, rows: torch.Tensor) -> None:
        """Rows of K (kind 0, before RoPE) or V (1) of window `index`, (seq_len, num_kv_heads, head_size).

        Raises CalibrationError when a value does not fit float16, or there are other heads than the config says.
        """
        heads, expected = tuple(rows.shape[1:]), (self.files.shape.num_kv_heads, self.files.shape.head_size)
        if heads != expected:
            raise CalibrationError(
                f"Layer {layer} has {heads[0]} KV heads of {heads[1]} channels, but the model's config says "
                f"{expected[0]} of {expected[1]}: it cannot be calibrated."
            )
        half = rows.to(torch.float16)
        _check_finite(half, layer, "its K or V does not fit float16")
        self.files.rows(layer)[kind, index] = half.cpu().numpy()

    def write_norms(self, index: int, layer: int, kind: int, norms: torch.Tensor) -> None:
        """What these rows weigh, (seq_len, num_kv_heads) float32; CalibrationError when one is not finite."""
        _check_finite(norms, layer, "its gradient is not finite")
        self.files.norms(layer)[kind, index] = norms.cpu().numpy()

    def write_queries(self, index: int, layer: int, energy: torch.Tensor) -> None:
        """The `query_energy` of a layer in window `index`."""
        self.files.queries()[index, layer] = energy.cpu().numpy()

    def write_sinks(self, index: int, hidden: torch.Tensor) -> None:
        """The channels that show sinks, of hidden states (seq_len, hidden_size) after the layer where they do."""
        assert self.sinks is not None
        self.files.sink_values()[index] = hidden[:, list(self.sinks.channels)].float().abs().cpu().numpy()


def capture_window(model: PreTrainedModel, window: torch.Tensor, index: int, capture: Capture) -> None:
    """Run one window and write its rows, its gradient norms where asked for, and its sink channels where there are any.

    Args:
        window: (seq_len,) int64 on the model's device.
        index: which window it is.

    Raises:
        CalibrationError: a K or V value does not fit float16, or a gradient is not finite.
    """
    sink_layers = [decoder_layers(model)[capture.sinks.layer]] if capture.sinks else []
    with (
        captured(
            model,
            capture.rotaries,
            partial(capture.write_rows, index),
            partial(capture.write_norms, index),
            partial(capture.write_queries, index),
        ),
        captured_hidden(sink_layers, partial(capture.write_sinks, index)),
        torch.set_grad_enabled(capture.weighted),
    ):
        loss = loss_of(model, window)
        if capture.weighted:
            loss.backward()


def _check_finite(tensor: torch.Tensor, layer: int, problem: str) -> None:
    if not torch.isfinite(tensor).all():
        raise CalibrationError(f"Layer {layer} cannot be calibrated: {problem}.")
