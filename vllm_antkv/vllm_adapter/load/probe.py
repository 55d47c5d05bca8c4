"""What the layers of a loaded model do with K and with hidden states: found by running it.

The model runs once, before it has a cache, on the probe of `ops.rope_detection`. So nothing here depends on what a
model's modules are called, and a layer that has a rotary module without using it is seen as one that rotates nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.sequence import IntermediateTensors

from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.ops.rope_detection import detect_rope
from vllm_antkv.vllm_adapter.load.rope import rotary_modules, rotary_tables, three_part_tables

#: Tokens of the probe, where a step may have as many.
_PROBE_TOKENS = 64


@dataclass(frozen=True)
class Probed:
    """What was found.

    rotaries: what turns the K of each layer, by its index; None where nothing does.
    adds_residual: whether the two tensors that a decoder layer hands on are still to be added to the hidden state, as
        in most models; otherwise the first one is the hidden state.
    """

    rotaries: dict[int, RotaryTable | None]
    adds_residual: bool


def probe(
    model: nn.Module,
    layers: Mapping[int, Attention],
    last_decoder_layer: nn.Module,
    vllm_config: VllmConfig,
    device: torch.device,
) -> Probed:
    """Run the model once, or its stage of a pipeline. All workers of a model do so at the same time.

    Raises:
        UnsupportedModelError: a layer turns K otherwise than by a table of the model, or not by the position alone.
    """
    model_config = vllm_config.model_config
    num_tokens = min(_PROBE_TOKENS, vllm_config.scheduler_config.max_num_batched_tokens)
    # From all over the model's length: a table that fits there fits everywhere.
    positions = torch.linspace(0, model_config.max_model_len - 1, num_tokens, device=device).long()
    # Neither BOS nor padding, whose embedding may be zero.
    tokens = torch.full_like(positions, model_config.get_vocab_size() // 2, dtype=torch.int32)
    if model_config.uses_mrope:
        # No two are alike: each pair of channels shows by which it turns.
        positions = torch.stack((positions, positions.flip(0), positions.roll(num_tokens // 3)))
    keys: dict[int, torch.Tensor] = {}
    trail = _Trail(last_decoder_layer)
    with (
        torch.inference_mode(),
        set_forward_context(None, vllm_config, num_tokens=num_tokens, skip_compiled=True),
        _passing_values_on(layers, keys),
        _Zeroed(),
        trail.followed(),
    ):
        before = None if get_pp_group().is_first_rank else _handed_on(model, num_tokens, model_config.dtype, device)
        hidden = model(input_ids=tokens, positions=positions, intermediate_tensors=before, inputs_embeds=None)
        if isinstance(hidden, IntermediateTensors):
            adds_residual = "residual" in hidden.tensors
        else:
            # An EAGLE-3 head gets what some layers hand on, too.
            adds_residual = trail.adds_residual(hidden[0] if isinstance(hidden, tuple) else hidden)
    return Probed(_rotaries(model, layers, keys, positions.movedim(-1, 0), vllm_config), adds_residual)


def _handed_on(model: Any, num_tokens: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
    """What a stage of a pipeline may get of the one before it: the same for all tokens, as embeddings are here."""
    made: IntermediateTensors = model.make_empty_intermediate_tensors(num_tokens, dtype, device)
    for tensor in made.tensors.values():
        tensor += torch.linspace(-1, 1, tensor.shape[-1], dtype=dtype, device=device)
    return made


def _rotaries(
    model: nn.Module,
    layers: Mapping[int, Attention],
    keys: Mapping[int, torch.Tensor],
    positions: torch.Tensor,
    vllm_config: VllmConfig,
) -> dict[int, RotaryTable | None]:
    modules = rotary_modules(model)
    if not modules:
        # Positions are embedded, or there are none: K is coded as it is.
        return dict.fromkeys(layers)
    model_config = vllm_config.model_config
    layer_types = tuple(getattr(model_config.hf_text_config, "layer_types", None) or ())
    found_tables = (
        three_part_tables(model)
        if model_config.uses_mrope
        else rotary_tables(model, layer_types, model_config.max_model_len)
    )
    tables = [table.to(positions.device) for table in found_tables if len(table.cos) >= model_config.max_model_len]
    found: dict[int, RotaryTable | None] = {}
    for index, layer in layers.items():
        turn = detect_rope(keys[index], positions, tables, model_config.dtype) if index in keys else None
        if turn is None:
            kinds = ", ".join(sorted({type(module).__name__ for _, module in modules}))
            raise UnsupportedModelError(
                f"The RoPE of {layer.layer_name} is not a table over positions alone (the model has {kinds}): serve "
                "this model with --kv-cache-dtype auto."
            )
        found[index] = None if turn < 0 else tables[turn]
    return found


class _Passing:
    """Stands in for what a layer runs: every query gets its own value.

    keys, values: of all layers, (num_tokens, num_kv_heads, head_size), which it adds to. source: index of the layer
    whose K and V this one has; its own, or that of the layer whose cache it reads.
    """

    def __init__(
        self, impl: Any, index: int, source: int, keys: dict[int, torch.Tensor], values: dict[int, torch.Tensor]
    ) -> None:
        self.impl, self._index, self._source = impl, index, source
        self._keys, self._values = keys, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.impl, name)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        """As `AttentionImpl.forward`."""
        if self._source == self._index:
            self._keys[self._index], self._values[self._index] = key.float(), value
        else:
            self._keys[self._index], self._values[self._index] = self._keys[self._source], self._values[self._source]
        values, output = self._values[self._index], options["output"]
        copied: torch.Tensor = output.copy_(values.repeat_interleave(query.shape[1] // values.shape[1], dim=1))
        return copied


@contextmanager
def _passing_values_on(layers: Mapping[int, Attention], keys: dict[int, torch.Tensor]) -> Iterator[None]:
    """While open, layers are `_Passing`, and `keys` gets K of each."""
    values: dict[int, torch.Tensor] = {}
    places = {layer.layer_name: index for index, layer in layers.items()}
    for index, layer in layers.items():
        source = places.get(layer.kv_sharing_target_layer_name, index)
        layer.impl = _Passing(layer.impl, index, source, keys, values)  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers.values():
            layer.impl = layer.impl.impl  # type: ignore[attr-defined]


class _Zeroed(TorchFunctionMode):
    """Zeros in new tensors: layers with a state that have no metadata leave their output as it was made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        return made.zero_() if func in (torch.empty, torch.empty_like, torch.Tensor.new_empty) else made


class _Trail:
    """What the last decoder layer hands on, and the module that makes the model's result of it: its final norm."""

    def __init__(self, last_decoder_layer: nn.Module) -> None:
        self._layer = last_decoder_layer
        self._handed_on: tuple[torch.Tensor, ...] = ()
        self._norm: nn.Module | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Watch one run."""

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if module is self._layer:
                # The norm may add in place.
                parts = output if isinstance(output, tuple) else ()
                self._handed_on = tuple(each.clone() for each in parts if torch.is_tensor(each))
            elif self._handed_on and self._norm is None and not any(module.children()):
                self._norm = module

        handle = nn.modules.module.register_module_forward_hook(after)
        try:
            yield
        finally:
            handle.remove()

    def adds_residual(self, hidden: torch.Tensor) -> bool:
        """Whether the norm of the sum, rather than of the first tensor alone, is `hidden`, the model's result."""
        if len(self._handed_on) != 2:
            return False
        first, residual = self._handed_on
        errors = [float((self._normed(x) - hidden).float().norm()) for x in (first, first + residual)]
        return errors[1] < errors[0]

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        result = x if self._norm is None else self._norm(x)
        return result[0] if isinstance(result, tuple) else result
