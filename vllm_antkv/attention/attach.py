"""Gives a loaded model's attention layers what they need for an antkv cache."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_antkv.attention.code_order import in_code_order
from vllm_antkv.attention.exact_layers import has_window, leave_exact
from vllm_antkv.attention.flash_attention import flash_attention
from vllm_antkv.attention.impl import AntKVImpl, Attachment
from vllm_antkv.attention.layer import RecencyLayer, recency_layer_name
from vllm_antkv.attention.model_layers import ModelLayers, attention_layers, decoder_layer
from vllm_antkv.attention.positions import PositionLayer, position_layer_name
from vllm_antkv.attention.probe import probe
from vllm_antkv.attention.sinks import SinkFlags, register_op, watch
from vllm_antkv.attention.startup import resolved_codebook
from vllm_antkv.attention.trained_prefix import LayerPrefix, PrefixTokens
from vllm_antkv.attention.worker import Worker, workspace
from vllm_antkv.cache.pages import PageLayout, page_layouts
from vllm_antkv.cache.specs import vq_spec
from vllm_antkv.codebook import Codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import CodebookError, UnsupportedModelError
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.dispatch import Kernels, choose
from vllm_antkv.ops.fp8_tables import served
from vllm_antkv.ops.layer import LayerKind, LayerSetup
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.reference import jensen_weights
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.select.recency import last_query_table

logger = logging.getLogger("vllm.antkv")


def attach(
    model: nn.Module, vllm_config: VllmConfig, device: torch.device, of_step: torch.Tensor | None = None
) -> Worker:
    """Attach codebooks, rotary tables, sinks, the trained prefix and recency companions to every attention layer.

    of_step: of a model with M-RoPE, as in `PositionLayer`.

    Raises:
        CodebookError: the file changed since start-up.
        UnsupportedModelError: a layer cannot be served.
    """
    settings = AntKVConfig.from_additional_config(vllm_config.additional_config)
    resolved = resolved_codebook(vllm_config)
    codebook = Codebook.load(Path(resolved.path))
    if codebook.identity != resolved.identity:
        raise CodebookError(f"{resolved.path} changed while the server was starting: start it again.")
    found = attention_layers(model, codebook.header.model, resolved.exact)
    decoder_layers = {index: decoder_layer(model, layer) for index, layer in found.every.items()}
    probed = probe(model, found.every, decoder_layers[max(decoder_layers)], vllm_config, device)
    rotaries = in_code_order(probed.rotaries, codebook)
    _leave_exact(found, vllm_config)
    dtype = vllm_config.model_config.dtype
    presets = codebook.header.layer_presets
    rules = {index: _logit_rules(layer, vllm_config) for index, layer in found.ours.items()}
    kinds = [
        LayerKind(
            presets[found.source(index)],
            layer.head_size,
            layer.num_heads // layer.num_kv_heads,
            dtype,
            rotaries[found.source(index)],
            rules[index].are_plain,
        )
        for index, layer in found.ours.items()
    ]
    kernels = choose(settings.kernels, device, kinds)
    shared = _Shared.of(settings, codebook, vllm_config, device, kernels, found.coded)
    if of_step is not None:
        shared = replace(shared, positions=_position_layer(found, rules, of_step, vllm_config))
    if codebook.header.prefix is not None:
        shared = replace(shared, prefix_tokens=_prefix_tokens(found, rules, codebook.header.prefix, shared))
    flags = _sink_flags(codebook, settings, vllm_config, device)
    for index, layout in zip(found.coded, _layouts(found, rules, shared), strict=True):
        sinks = flags if flags is not None and index > _sink_layer(codebook) else None
        _attach_layer(found.every[index], index, _Own(layout, rotaries[index], rules[index], sinks), shared)
    for index in found.sources.keys() & found.ours.keys():
        _attach_reader(found, index, rules[index], codebook)
    if flags is not None and shared.last_layer > _sink_layer(codebook):
        register_op()
        watch(decoder_layers[_sink_layer(codebook)], probed.adds_residual, found.every[shared.last_layer].layer_name)
    return Worker(shared.counters, shared.prefix_tokens)


def _leave_exact(found: ModelLayers, vllm_config: VllmConfig) -> None:
    for index in found.exact:
        leave_exact(found.every[index], vllm_config.model_config.max_model_len)
    # vLLM would now make blocks larger, until a page of ours is as large as one of theirs. They lie side by side.
    vllm_config.cache_config.kv_cache_dtype_skip_layers = []


def _layouts(found: ModelLayers, rules: dict[int, LogitRules], shared: "_Shared") -> list[PageLayout]:
    """Of the layers with codes."""
    header, model_config = shared.codebook.header, shared.vllm_config.model_config
    exact = [found.every[index] for index in found.exact if index not in found.sources]
    num_beside = sum(not has_window(layer, model_config.max_model_len) for layer in exact)
    all_slide = not num_beside and all(rules[index].window is not None for index in found.coded)
    presets = [header.layer_presets[index] for index in found.coded]
    return page_layouts(shared.settings, presets, header.model.head_size, model_config.dtype, all_slide, num_beside)


@dataclass(frozen=True)
class _Shared:
    """What all layers of a worker have in common.

    coded: indices of the layers with codes.
    prefix_tokens: where the codebook has a trained prefix.
    """

    settings: AntKVConfig
    codebook: Codebook
    vllm_config: VllmConfig
    device: torch.device
    kernels: Kernels
    counters: Counters
    last_queries: "_LastQueries"
    coded: tuple[int, ...]
    positions: PositionLayer | None = None
    prefix_tokens: PrefixTokens | None = None

    @property
    def last_layer(self) -> int:
        """The index of the last layer with codes."""
        return max(self.coded)

    @classmethod
    def of(
        cls,
        settings: AntKVConfig,
        codebook: Codebook,
        vllm_config: VllmConfig,
        device: torch.device,
        kernels: Kernels,
        coded: tuple[int, ...],
    ) -> "_Shared":
        """Make what is shared, and say which kernels run."""
        logger.info("antkv kernels: %s", kernels.title)
        last_queries = _LastQueries(settings, vllm_config.model_config.max_model_len, device)
        counters = Counters(device, kernels.name)
        return cls(settings, codebook, vllm_config, device, kernels, counters, last_queries, coded)


class _LastQueries:
    """Tables of what is seen exactly, shared by the layers that have the same."""

    def __init__(self, settings: AntKVConfig, max_len: int, device: torch.device) -> None:
        self._settings, self._max_len, self._device = settings, max_len, device
        self._tables: dict[int | None, torch.Tensor] = {}

    def of(self, window: int | None) -> torch.Tensor:
        """See `select.recency.last_query_table`."""
        known = window if self._settings.windows == "exact" else None
        if known not in self._tables:
            self._tables[known] = last_query_table(self._settings, self._max_len, known).to(self._device)
        return self._tables[known]


class _Own(NamedTuple):
    """What a layer does not share with the others."""

    layout: PageLayout
    rotary: RotaryTable | None
    rules: LogitRules
    sinks: SinkFlags | None


def _logit_rules(layer: Attention, vllm_config: VllmConfig) -> LogitRules:
    assert isinstance(layer.impl, AntKVImpl)
    return layer.impl.logit_rules(vllm_config.model_config.max_model_len)


def _attach_layer(layer: Attention, index: int, own: _Own, shared: _Shared) -> None:
    settings, device, dtype = shared.settings, shared.device, shared.vllm_config.model_config.dtype
    codebook = shared.codebook
    companion = RecencyLayer(own.layout, layer.num_kv_heads, dtype, settings, own.rules.window)
    name = recency_layer_name(layer.layer_name)
    shared.vllm_config.compilation_config.static_forward_context[name] = companion
    heads = _heads_of_rank(codebook.header.model.num_kv_heads, layer.num_kv_heads)
    assert isinstance(layer.impl, AntKVImpl)
    # As the file has them where kernels can read that: a second copy at 4,096 centroids is over a gigabyte.
    held_in = torch.float16 if shared.kernels.on_gpu else torch.float32
    max_num_tokens = shared.vllm_config.scheduler_config.max_num_batched_tokens
    setup = LayerSetup(
        config=settings,
        preset=own.layout.preset,
        k_centroids=served(codebook.k[index][heads].to(device, held_in)),
        v_centroids=served(codebook.v[index][heads].to(device, held_in)),
        k_order=_k_order(codebook, index, device),
        rotary=own.rotary,
        jensen_weights=_jensen_weights(codebook, index, layer, (index, own.rules, own.rotary)).to(device),
        last_query=shared.last_queries.of(own.rules.window),
        num_heads=layer.num_heads,
        rules=own.rules,
        counters=shared.counters,
        # It counts tokens, sinks and anchors for all: it is behind the layer that reveals the sinks.
        counts_rows=index == shared.last_layer,
        max_num_reqs=shared.vllm_config.scheduler_config.max_num_seqs,
        scratch=workspace,
        varlen=flash_attention(layer.head_size, dtype, max_num_tokens) if shared.kernels.on_gpu else None,
    )
    layer.impl.attachment = Attachment(
        setup=setup,
        layout=own.layout,
        source=None,
        sinks=own.sinks,
        prefix=_layer_prefix(codebook, index, heads, shared),
        recency_name=name,
        recency=companion,
        positions=shared.positions,
        stores_positions=shared.positions is not None and index == min(shared.coded),
        kernels=shared.kernels,
    )
    spec = vq_spec(own.layout, layer.num_kv_heads, own.rules.window)

    def get_kv_cache_spec(self: Attention, vllm_config: VllmConfig) -> KVCacheSpec:
        return spec

    # The layer builds its spec from head size and dtype; only this layer knows its page's bytes.
    layer.get_kv_cache_spec = MethodType(get_kv_cache_spec, layer)  # type: ignore[method-assign]


def _position_layer(
    found: ModelLayers, rules: dict[int, LogitRules], of_step: torch.Tensor, vllm_config: VllmConfig
) -> PositionLayer:
    """The companion of all layers, beside the first of them."""
    for index in found.coded:
        if rules[index].window is not None:
            # Pages of such layers have a block table of their own, and the positions would need a second page in it.
            raise UnsupportedModelError(
                f"{found.every[index].layer_name} has a sliding window, which an antkv cache does not support beside "
                "M-RoPE: serve this model with --kv-cache-dtype auto."
            )
    companion = PositionLayer(of_step)
    name = position_layer_name(found.every[min(found.coded)].layer_name)
    vllm_config.compilation_config.static_forward_context[name] = companion
    return companion


def _attach_reader(found: ModelLayers, index: int, rules: LogitRules, codebook: Codebook) -> None:
    """Let a layer without a cache of its own read that of its source."""
    layer, source = found.every[index], found.every[found.source(index)]
    assert isinstance(layer.impl, AntKVImpl)
    assert isinstance(source.impl, AntKVImpl)
    attachment = source.impl.attachment
    assert attachment is not None
    source.impl.is_read = True
    setup = attachment.setup
    weights = _jensen_weights(codebook, index, layer, (found.source(index), rules, setup.rotary))
    setup = replace(setup, rules=rules, counts_rows=False, jensen_weights=weights.to(setup.jensen_weights))
    layer.impl.attachment = replace(attachment, setup=setup, source=source.impl, stores_positions=False)


def _jensen_weights(
    codebook: Codebook, index: int, layer: Attention, coded: tuple[int, LogitRules, RotaryTable | None]
) -> torch.Tensor:
    """See `LayerSetup`; `coded`: the layer whose K these queries read, the rules of their logits, K's rotary table."""
    source, rules, rotary = coded
    if codebook.key_errors is None:
        return torch.zeros(layer.num_heads, layer.head_size)
    errors, gain = codebook.key_errors.of_layers(source, index)
    first = get_tensor_model_parallel_rank() * layer.num_heads
    heads = _heads_of_rank(codebook.header.model.num_kv_heads, layer.num_kv_heads)
    return jensen_weights(errors[heads], gain[first : first + layer.num_heads], rules.scale, rotary)


def _k_order(codebook: Codebook, index: int, device: torch.device) -> torch.Tensor | None:
    order = codebook.header.k_order(index)
    return None if order is None else torch.tensor(order, dtype=torch.int32, device=device)


def _prefix_tokens(
    found: ModelLayers, rules: dict[int, LogitRules], token_ids: tuple[int, ...], shared: _Shared
) -> PrefixTokens:
    # The first page of layers without a window is kept as long as the request runs.
    index = min(found.coded, key=lambda index: (rules[index].window is not None, index))
    window = rules[index].window
    if window is not None and window < len(token_ids):
        raise UnsupportedModelError(
            f"The codebook's trained prefix of {len(token_ids)} tokens is longer than the windows of the model's "
            f"layers ({window} tokens): run `antkv calibrate` without --train-prefix."
        )
    max_num_tokens = shared.vllm_config.scheduler_config.max_num_batched_tokens
    return PrefixTokens(token_ids, found.every[index].layer_name, max_num_tokens, shared.device)


def _layer_prefix(codebook: Codebook, index: int, heads: slice, shared: _Shared) -> LayerPrefix | None:
    prefix, tokens = codebook.prefix, shared.prefix_tokens
    if prefix is None or tokens is None:
        return None
    dtype = shared.vllm_config.model_config.dtype
    k, v = (pad(rows[index, :, heads], (0, 0, 0, 0, 0, 1)).to(shared.device, dtype) for rows in (prefix.k, prefix.v))
    return LayerPrefix(tokens, k, v)


def _sink_flags(
    codebook: Codebook, settings: AntKVConfig, vllm_config: VllmConfig, device: torch.device
) -> SinkFlags | None:
    rule = codebook.header.sinks
    if rule is None or not settings.sinks:
        return None
    return SinkFlags(rule, vllm_config.scheduler_config.max_num_batched_tokens, device)


def _sink_layer(codebook: Codebook) -> int:
    assert codebook.header.sinks is not None
    return codebook.header.sinks.layer


def _heads_of_rank(num_kv_heads: int, heads_here: int) -> slice:
    """KV heads of this tensor-parallel rank; with more ranks than heads, ranks share a head, as in vLLM."""
    rank, world_size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    first = rank * heads_here if num_kv_heads >= world_size else rank * num_kv_heads // world_size
    return slice(first, first + heads_here)
