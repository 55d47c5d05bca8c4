"""Gives a loaded model's attention layers what they need for an antkv cache."""

import logging
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_antkv.attention.flash_attention import flash_attention
from vllm_antkv.attention.impl import AntKVImpl, Attachment
from vllm_antkv.attention.layer import RecencyLayer, recency_layer_name
from vllm_antkv.attention.rope import rotary_table
from vllm_antkv.attention.sinks import SinkFlags, register_op, watch
from vllm_antkv.attention.startup import resolved_codebook
from vllm_antkv.attention.trained_prefix import LayerPrefix, PrefixTokens, set_prefix_tokens
from vllm_antkv.attention.worker import Worker, set_worker, workspace
from vllm_antkv.cache.pages import PageLayout, page_layouts
from vllm_antkv.cache.specs import vq_spec
from vllm_antkv.codebook import Codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import CodebookError, UnsupportedModelError
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.dispatch import Kernels, choose
from vllm_antkv.ops.fp8_tables import served
from vllm_antkv.ops.layer import LayerKind
from vllm_antkv.ops.rope import RotaryTable, reordered
from vllm_antkv.select.recency import last_query_table

logger = logging.getLogger("vllm.antkv")


def attach(model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> Counters:
    """Attach codebooks, rotary tables, sinks, the trained prefix and recency companions to every attention layer.

    Returns what the layers count from now on.

    Raises:
        CodebookError: the file changed since start-up.
        UnsupportedModelError: a layer cannot be served.
    """
    settings = AntKVConfig.from_additional_config(vllm_config.additional_config)
    resolved = resolved_codebook(vllm_config)
    codebook = Codebook.load(Path(resolved.path))
    if codebook.identity != resolved.identity:
        raise CodebookError(f"{resolved.path} changed while the server was starting: start it again.")
    context = vllm_config.compilation_config.static_forward_context
    flags = _watch_sinks(model, codebook, settings, vllm_config, device, context)
    layers = _attention_layers(model)
    rotaries = _rotaries(layers, codebook, device)
    dtype = vllm_config.model_config.dtype
    presets = codebook.header.layer_presets
    kinds = [
        LayerKind(presets[index], layer.head_size, layer.num_heads // layer.num_kv_heads, dtype, rotaries[index])
        for index, (layer, _) in layers.items()
    ]
    shared = _Shared.of(settings, codebook, vllm_config, device, choose(settings.kernels, device, kinds), max(layers))
    if shared.prefix_tokens is not None:
        set_prefix_tokens(context, shared.prefix_tokens)
    layouts = page_layouts(settings, presets, codebook.header.model.head_size, dtype)
    for index, (layer, _) in layers.items():
        sinks = flags if flags is not None and index > _sink_layer(codebook) else None
        _attach_layer(layer, index, layouts[index], rotaries[index], sinks, shared)
    set_worker(vllm_config, Worker(shared.kernels, shared.counters, layers[shared.last_layer][0].layer_name))
    return shared.counters


@dataclass(frozen=True)
class _Shared:
    """What all layers of a worker have in common; other fields as in `Attachment`.

    prefix_tokens: where the codebook has a trained prefix.
    last_layer: the index of the last layer here.
    """

    settings: AntKVConfig
    codebook: Codebook
    vllm_config: VllmConfig
    device: torch.device
    kernels: Kernels
    counters: Counters
    last_query: torch.Tensor
    prefix_tokens: PrefixTokens | None
    last_layer: int

    @classmethod
    def of(
        cls,
        settings: AntKVConfig,
        codebook: Codebook,
        vllm_config: VllmConfig,
        device: torch.device,
        kernels: Kernels,
        last_layer: int,
    ) -> "_Shared":
        """Make what is shared, and say which kernels run."""
        logger.info("antkv kernels: %s", kernels.title)
        last_query = last_query_table(settings, vllm_config.model_config.max_model_len).to(device)
        ids = codebook.header.prefix
        prefix_tokens = None if ids is None else PrefixTokens(ids, device)
        counters = Counters(device, kernels.name)
        return cls(settings, codebook, vllm_config, device, kernels, counters, last_query, prefix_tokens, last_layer)


def _attach_layer(
    layer: Attention,
    index: int,
    layout: PageLayout,
    rotary: RotaryTable,
    sinks: SinkFlags | None,
    shared: _Shared,
) -> None:
    settings, device, dtype = shared.settings, shared.device, shared.vllm_config.model_config.dtype
    codebook = shared.codebook
    companion = RecencyLayer(layout, layer.num_kv_heads, dtype, settings)
    name = recency_layer_name(layer.layer_name)
    shared.vllm_config.compilation_config.static_forward_context[name] = companion
    heads = _heads_of_rank(codebook.header.model.num_kv_heads, layer.num_kv_heads)
    assert isinstance(layer.impl, AntKVImpl)
    # As the file has them where kernels can read that: a second copy at 4,096 centroids is over a gigabyte.
    held_in = torch.float16 if shared.kernels.on_gpu else torch.float32
    max_num_tokens = shared.vllm_config.scheduler_config.max_num_batched_tokens
    layer.impl.attachment = Attachment(
        settings=settings,
        layout=layout,
        dtype=dtype,
        k_centroids=served(codebook.k[index][heads].to(device, held_in)),
        v_centroids=served(codebook.v[index][heads].to(device, held_in)),
        k_order=_k_order(codebook, index, device),
        rotary=rotary,
        sinks=sinks,
        prefix=_layer_prefix(codebook, index, heads, shared),
        recency_name=name,
        recency=companion,
        counters=shared.counters,
        # It counts tokens, sinks and anchors for all: it is behind the layer that reveals the sinks.
        counts_rows=index == shared.last_layer,
        last_query=shared.last_query,
        kernels=shared.kernels,
        max_num_reqs=shared.vllm_config.scheduler_config.max_num_seqs,
        scratch=workspace,
        varlen=flash_attention(layer.head_size, dtype, max_num_tokens) if shared.kernels.on_gpu else None,
    )
    spec = vq_spec(layout, layer.num_kv_heads)

    def get_kv_cache_spec(self: Attention, vllm_config: VllmConfig) -> KVCacheSpec:
        return spec

    # The layer builds its spec from head size and dtype; only this layer knows its page's bytes.
    layer.get_kv_cache_spec = MethodType(get_kv_cache_spec, layer)  # type: ignore[method-assign]


def _k_order(codebook: Codebook, index: int, device: torch.device) -> torch.Tensor | None:
    order = codebook.header.k_order(index)
    return None if order is None else torch.tensor(order, dtype=torch.int32, device=device)


def _layer_prefix(codebook: Codebook, index: int, heads: slice, shared: _Shared) -> LayerPrefix | None:
    prefix, tokens = codebook.prefix, shared.prefix_tokens
    if prefix is None or tokens is None:
        return None
    dtype = shared.vllm_config.model_config.dtype
    k, v = (rows[index, :, heads].to(shared.device, dtype) for rows in (prefix.k, prefix.v))
    return LayerPrefix(tokens, k, v)


def _rotaries(
    layers: dict[int, tuple[Attention, nn.Module]], codebook: Codebook, device: torch.device
) -> dict[int, RotaryTable]:
    """For each layer; those with the same rotary module and order of channels share one."""
    tables: dict[tuple[int, tuple[int, ...] | None], RotaryTable] = {}
    found = {}
    for index, (layer, module) in layers.items():
        key = id(module), codebook.header.k_order(index)
        if key not in tables:
            tables[key] = _rotary(module, layer.layer_name, key[1]).to(device)
        found[index] = tables[key]
    return found


def _rotary(module: nn.Module, layer_name: str, order: tuple[int, ...] | None) -> RotaryTable:
    """For rows in the order of channels that codes have."""
    table = rotary_table(module, layer_name)
    try:
        return table if order is None else reordered(table, order)
    except ValueError as error:
        raise CodebookError(
            f"The codebook does not fit the RoPE of {layer_name} ({error}): run `antkv calibrate` on this model."
        ) from None


def _attention_layers(model: nn.Module) -> dict[int, tuple[Attention, nn.Module]]:
    """Every attention layer with the rotary module beside it, by its index."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            parent = model.get_submodule(name.rpartition(".")[0])
            rotary = getattr(parent, "rotary_emb", None)
            if rotary is None:
                raise UnsupportedModelError(
                    f"{module.layer_name} has no rotary_emb beside it, and an antkv cache needs to know its RoPE."
                )
            found[extract_layer_index(module.layer_name)] = (module, rotary)
    return found


def _watch_sinks(
    model: nn.Module,
    codebook: Codebook,
    settings: AntKVConfig,
    vllm_config: VllmConfig,
    device: torch.device,
    context: dict[str, Any],
) -> SinkFlags | None:
    rule = codebook.header.sinks
    if rule is None or not settings.sinks:
        return None
    register_op()
    flags = SinkFlags(rule, vllm_config.scheduler_config.max_num_batched_tokens, device)
    watch(_decoder_layer(model, rule.layer), flags, context)
    return flags


def _decoder_layer(model: nn.Module, index: int) -> nn.Module:
    for name, module in model.named_modules():
        if name.endswith(f"layers.{index}"):
            return module
    raise UnsupportedModelError(f"The model has no decoder layer {index}, where the codebook says sinks emerge.")


def _sink_layer(codebook: Codebook) -> int:
    assert codebook.header.sinks is not None
    return codebook.header.sinks.layer


def _heads_of_rank(num_kv_heads: int, heads_here: int) -> slice:
    """KV heads of this tensor-parallel rank; with more ranks than heads, ranks share a head, as in vLLM."""
    rank, world_size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    first = rank * heads_here if num_kv_heads >= world_size else rank * num_kv_heads // world_size
    return slice(first, first + heads_here)
