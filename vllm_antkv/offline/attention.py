"""Attention of a whole window through a quantised past: what the serving engine computes, on a Hugging Face model.

The query at position i sees row j exactly (K after RoPE and V, full precision) iff i <= last_query[j] (recency, the
intact prefix, itself; `select.recency`), and otherwise as it comes back from the cache: from its code, and if it is an
anchor of a block that closed before i's block began, with the correction that is stored for it, or as it is where the
cache keeps that. Blocks are taken in order, because the anchors of one decide what the next sees.

The logits of coded rows are corrected by what a codebook knows of its errors (`ops.reference.jensen_bias`). K and
queries are scaled as a codebook says (`codebook.key_scales`).
A layer's sliding window, soft cap and learned sink logits are what the model hands over with its rows (`LogitRules`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from vllm_antkv.codebook.key_scales import query_scales
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.offline.capture_attention import layer_of, replaced
from vllm_antkv.offline.coded_rows import CodedRows, OwnQueries, closed_rows, decoded_rows
from vllm_antkv.offline.hidden import handed_on
from vllm_antkv.offline.method import LayerWindow, Method
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.traits import LayerTraits, layer_traits, rotary_tables
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.reference import SeenRows, jensen_bias, jensen_weights, mixed_attention
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.select.recency import last_query_table


@contextmanager
def quantised_past(model: PreTrainedModel, method: Method, num_tokens: int) -> Iterator[None]:
    """While open, `model` attends through `method`; its own attention comes back at the end.

    The model must be called on whole windows of at most `num_tokens` tokens, without padding and without a KV cache.

    Raises:
        UnsupportedModelError: its K cannot be turned back.
    """
    if method.quantiser is None and method.attention is None:
        yield
        return
    with watched_run(model, method, num_tokens) as run, replaced(model, run.attend):
        yield


@contextmanager
def watched_run(model: PreTrainedModel, method: Method, num_tokens: int) -> Iterator["Run"]:
    """While open, the run sees the sinks of every window that `model` is called on."""
    run = Run(method, rotary_tables(model, num_tokens), layer_traits(model))
    with ExitStack() as hooks:
        if method.sinks is not None:
            emergence = decoder_layers(model)[method.sinks.layer]
            hooks.callback(emergence.register_forward_hook(run.watch_sinks).remove)
        yield run


class Run:
    """One method on one model: what the attention function and the sink hook share.

    is_sink: (num_windows, num_tokens) of the windows in hand (`Method.sinks_among`), None until the emergence layer has
        run.
    sources: of each layer that attends to the K and V of another, that one.
    """

    def __init__(self, method: Method, rotaries: list[RotaryTable], traits: list[LayerTraits]) -> None:
        self.method = method
        self.rotaries = rotaries
        self.traits = traits
        self.sources = {layer: each.source for layer, each in enumerate(traits) if each.source is not None}
        # Of the windows in hand, those of layers that others attend to.
        self._read: dict[int, LayerWindow] = {}
        self.is_sink: torch.Tensor | None = None

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The signature of transformers' AttentionInterface: (num_windows, heads, num_tokens, head_size) in."""
        attend = self.method.attention or attend_window
        window = self.window(module, query, key, value, kwargs | {"scaling": scaling})
        return attend(window, self.method, self.sinks_seen(window)).to(query.dtype), None

    def window(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]
    ) -> LayerWindow:
        """The rows of a layer, from what transformers hands to its attention."""
        layer = layer_of(module)
        # In bfloat16 the model hands over rows of the served precision; what is computed with them is float32.
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (rows.transpose(1, 2).to(dtype) for rows in (query, key, value))
        if self.method.k_scale is not None:
            k_scale = self.method.k_scale[self.sources.get(layer, layer)].to(k)
            q, k = q * query_scales(k_scale, q.shape[2]), k * k_scale
        rules = LogitRules(options["scaling"], *map(options.get, ("sliding_window", "softcap", "s_aux")))
        if layer in self.sources:
            source = self._read[self.sources[layer]]
            return LayerWindow(layer, q, source.key, source.value, rules, source.rotary, source)
        window = LayerWindow(layer, q, k, v, rules, self.rotaries[layer])
        if layer in self.sources.values():
            self._read[layer] = window
        return window

    def sinks_seen(self, window: LayerWindow) -> torch.Tensor | None:
        """(num_windows, num_tokens) bool, or None in layers before the one where sinks show."""
        rule = self.method.sinks
        return self.is_sink if rule is not None and self.traits[window.owner.layer].index > rule.layer else None

    def watch_sinks(self, module: nn.Module, args: Any, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        """Forward hook of decoder layer `rule.layer` (KVSink, algorithm 1, by threshold)."""
        rule = self.method.sinks
        assert rule is not None
        magnitude = handed_on(output)[..., list(rule.channels)].abs()
        self.is_sink = self.method.sinks_among(magnitude)


def attend_window(
    window: LayerWindow,
    method: Method,
    is_sink: torch.Tensor | None,
    chosen_by: Callable[[LayerWindow, AntKVConfig], OwnQueries] = OwnQueries,
    every: int = 1,
) -> torch.Tensor:
    """Attention of one layer over whole windows, every query seeing the past as it comes back from the cache.

    Args:
        window: rows in full precision.
        method: with a quantiser.
        is_sink: (num_windows, num_tokens) bool, or None where no sinks are known.
        chosen_by: what chooses anchors.
        every: one query in so many attends, the first of a block and those that follow; divides `VQ_BLOCK_SIZE`.

    Returns:
        (num_windows, num_tokens / every rounded up, num_heads, head_size).
    """
    assert method.quantiser is not None
    query, key, value, rules = window.query, window.key, window.value, window.rules
    num_tokens, config, owner = key.shape[1], method.config, window.owner
    positions = torch.arange(num_tokens, device=key.device)
    last_query = last_query_table(config, num_tokens, rules.window).to(key.device)
    decoded = decoded_rows(window, method.quantiser)
    closed = closed_rows(decoded, chosen_by(owner, config), is_sink)
    weights = _jensen_weights(window, method)
    # Split once: a gradient of a slice has the size of the whole.
    past, own = ([of.split(VQ_BLOCK_SIZE, 1) for of in kinds] for kinds in (closed, decoded))
    outputs = []
    for block, attending in enumerate(query[:, ::every].split(VQ_BLOCK_SIZE // every, 1)):
        places = positions[block * VQ_BLOCK_SIZE :: every][: attending.shape[1], None]
        stop = min((block + 1) * VQ_BLOCK_SIZE, num_tokens)
        visible = rules.visible(places, positions[:stop])
        exact = visible & (places <= last_query[:stop])
        columns = exact.any(0).nonzero().flatten()
        coded = CodedRows(*(torch.cat((*of[:block], its[block]), 1) for of, its in zip(past, own, strict=True)))
        output = mixed_attention(
            attending,
            SeenRows(coded.key, coded.value, (visible & ~exact)[None]),
            SeenRows(key[:, columns], value[:, columns], exact[None, :, columns]),
            rules,
            jensen_bias(attending, weights, coded.is_code),
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _jensen_weights(window: LayerWindow, method: Method) -> torch.Tensor:
    """(num_heads, head_size) in the dtype of the rows; zeros where the method's codes are not corrected."""
    num_heads, head_size = window.query.shape[2:]
    if method.key_errors is None:
        return window.query.new_zeros(num_heads, head_size)
    errors = method.key_errors[window.owner.layer]
    weights = jensen_weights(errors, num_heads, window.rules.scale, window.owner.rotary)
    return weights.to(window.query)
