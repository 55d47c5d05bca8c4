"""What a model that vLLM has loaded hands to its attention layers, for those who learn from it.

It is what an antkv cache is handed by the same model: K after RoPE and norms, and V, in the model's dtype. Knows
nothing of codebooks.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.vllm_adapter.load.model_layers import decoder_layers
from vllm_antkv.vllm_adapter.load.probe import Probed, probe


@dataclass(frozen=True)
class HandedRows:
    """The rows of one layer in one step.

    query: (num_tokens, num_heads, head_size), after RoPE.
    key, value: (num_tokens, num_kv_heads, head_size), keys after RoPE.
    rules: how logits come about.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rules: LogitRules


@contextmanager
def watched(
    model: nn.Module,
    adds_residual: bool,
    on_rows: Callable[[int, HandedRows], None],
    on_hidden: Callable[[int, torch.Tensor], None] = lambda layer, hidden: None,
) -> Iterator[None]:
    """While open, every step of an eager model hands over what goes into its layers and what comes out.

    Args:
        adds_residual: as in `Probed`.
        on_rows: receives the index of each layer that attends, counted among those, and its rows.
        on_hidden: receives the index of each decoder layer, and the hidden states after it, (num_tokens, hidden_size).
    """

    layers = _layers(model)
    sources = {attention.kv_sharing_target_layer_name for attention in layers}
    places = {attention.layer_name: index for index, attention in enumerate(layers)}
    read: dict[str, tuple[torch.Tensor, ...]] = {}

    def before_attention(layer: Attention, args: tuple[torch.Tensor, ...]) -> None:
        # A layer that reads the cache of another is handed no K and V.
        source = layer.kv_sharing_target_layer_name
        rows = (args[0], *(args[1:3] if source is None else read[source]))
        if layer.layer_name in sources:
            read[layer.layer_name] = rows[1:]
        query, key, value = (each.unflatten(-1, (-1, layer.head_size)) for each in rows)
        on_rows(places[layer.layer_name], HandedRows(query, key, value, _rules(layer)))

    def after_decoder(index: int) -> Callable[..., None]:
        def hand_over(module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            on_hidden(index, parts[0].float() + parts[1].float() if adds_residual else parts[0])

        return hand_over

    with ExitStack() as stack:
        for attention in layers:
            stack.callback(attention.register_forward_pre_hook(before_attention).remove)
        for index, decoder in enumerate(decoder_layers(model, layers[0])):
            stack.callback(decoder.register_forward_hook(after_decoder(index)).remove)
        yield


def probed(model: nn.Module, vllm_config: VllmConfig) -> Probed:
    """What its layers do with K and with hidden states.

    Raises:
        UnsupportedModelError: that cannot be told.
    """
    layers = _layers(model)
    last = decoder_layers(model, layers[0])[-1]
    return probe(model, dict(enumerate(layers)), last, vllm_config, next(model.parameters()).device)


def _rules(layer: Any) -> LogitRules:
    """As vLLM's own attention has them."""
    sinks = layer.impl.sinks
    return LogitRules(
        layer.impl.scale,
        layer.sliding_window,
        layer.impl.logits_soft_cap or None,
        None if sinks is None else sinks.detach().float(),
    )


def _layers(model: nn.Module) -> list[Attention]:
    """Every attention layer, in the order of the model."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    return sorted(layers, key=lambda layer: extract_layer_index(layer.layer_name))
