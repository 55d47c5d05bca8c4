"""Gives a loaded model's attention layers what they need for an antkv cache."""

import logging
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.codebook import Codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.dispatch import Kernels, cautions, choose, summary
from vllm_antkv.ops.fp8_tables import served
from vllm_antkv.ops.layer import LayerKind, LayerSetup
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.reference import jensen_weights
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.select.recency import last_query_table
from vllm_antkv.vllm_adapter.block_pool.specs import vq_spec
from vllm_antkv.vllm_adapter.load.model_layers import (
    ModelLayers,
    attention_layers,
    decoder_layers,
    leave_exact,
    outgrown_window,
    set_spec,
)
from vllm_antkv.vllm_adapter.load.probe import probe
from vllm_antkv.vllm_adapter.load.rope import in_code_order
from vllm_antkv.vllm_adapter.load.same_on_ranks import load_codebook
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan
from vllm_antkv.vllm_adapter.step.flash_attention import flash_attention
from vllm_antkv.vllm_adapter.step.impl import AntKVImpl, Attachment
from vllm_antkv.vllm_adapter.step.key_scales import scale_rows
from vllm_antkv.vllm_adapter.step.layer import PositionLayer, RecencyLayer, position_layer_name, recency_layer_name
from vllm_antkv.vllm_adapter.step.sinks import SinkFlags, hand_on, watch
from vllm_antkv.vllm_adapter.step.workspace import Workspace

logger = logging.getLogger("vllm.antkv")


def attach(
    model: nn.Module, vllm_config: VllmConfig, device: torch.device, of_step: torch.Tensor | None = None
) -> Counters:
    """Attach codebooks, rotary tables, sinks and recency companions to every attention layer.

    of_step: of a model with M-RoPE, as in `PositionLayer`.

    Returns:
        What the layers count.

    Raises:
        CodebookError, SettingsError: the file cannot be served, or is not that of start-up or of other ranks.
        UnsupportedModelError: a layer cannot be served.
    """
    plan = engine_plan(vllm_config)
    settings = plan.settings
    codebook = load_codebook(vllm_config)
    found = attention_layers(model, codebook.header.model, plan.exact)
    around = decoder_layers(model, found.every[min(found.every)])
    here = [index for index, layer in enumerate(around) if not isinstance(layer, PPMissingLayer)]
    probed = probe(model, found.every, around[here[-1]], vllm_config, device)
    rotaries = in_code_order(probed.rotaries, codebook)
    _leave_exact(found, vllm_config)
    rules = {
        index: _impl(layer).logit_rules(vllm_config.model_config.max_model_len) for index, layer in found.ours.items()
    }
    kinds = {
        index: LayerKind(
            codebook.header.layer_presets[found.source(index)],
            layer.head_size,
            layer.num_heads // layer.num_kv_heads,
            vllm_config.model_config.dtype,
            rotaries[found.source(index)],
            rules[index].are_plain,
        )
        for index, layer in found.ours.items()
    }
    chosen = dict(zip(kinds, choose(settings.kernels, device, list(kinds.values())), strict=True))
    logger.info("antkv kernels: %s", summary(chosen))
    for caution in cautions(chosen):
        logger.warning("%s", caution)
    kernels = {index: layer.kernels for index, layer in chosen.items()}
    names = "+".join(dict.fromkeys(each.name for each in kernels.values()))
    counters = Counters(device, names, vllm_config.scheduler_config.max_num_seqs)
    decoder_indices = codebook.header.model.decoder_indices
    rule, max_num_tokens = codebook.header.sinks, vllm_config.scheduler_config.max_num_batched_tokens
    sinks = None
    if rule is not None and settings.sinks and decoder_indices[-1] > rule.layer:
        sinks = SinkFlags(rule, max_num_tokens, device)
        if rule.layer in here:
            context = vllm_config.compilation_config.static_forward_context
            watch(around[rule.layer], probed.adds_residual, sinks, context)
        if (stage := get_pp_group()).world_size > 1:
            hand_on(model, sinks, stage.is_first_rank, stage.is_last_rank)
    positions = None if of_step is None else _position_layer(found, rules, of_step, vllm_config)
    shared = _Shared(
        settings, codebook, vllm_config, device, kernels, counters, found, rules, rotaries, sinks, positions
    )
    is_exact = [layer in plan.exact for layer in decoder_indices]
    for index in found.coded:
        _attach_layer(index, plan.layouts[index - sum(is_exact[:index])], shared)
        _scale_rows(index, shared)
    for index in found.sources.keys() & found.ours.keys():
        _attach_reader(index, shared)
        _scale_rows(index, shared)
    return counters


def _leave_exact(found: ModelLayers, vllm_config: VllmConfig) -> None:
    for index in found.exact:
        layer = found.every[index]
        leave_exact(layer, outgrown_window(layer, vllm_config.model_config.max_model_len))
    ours = {layer.layer_name for layer in found.every.values()}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if isinstance(layer, Attention) and name not in ours:
            # Of a model that drafts. vLLM wants one block table for all its layers, whatever their windows.
            leave_exact(layer)
    # vLLM would now make blocks larger, until a page of ours is as large as one of theirs. They lie side by side.
    vllm_config.cache_config.kv_cache_dtype_skip_layers = []


def _impl(layer: Attention) -> AntKVImpl:
    assert isinstance(layer.impl, AntKVImpl)
    return layer.impl


@dataclass(frozen=True)
class _Shared:
    """What all layers of a worker have in common.

    kernels, found, rules, rotaries: the layers, by their indices what runs them, how their logits come about, and what
        turns their K.
    sinks: where sinks are pinned. positions: with M-RoPE.
    """

    settings: AntKVConfig
    codebook: Codebook
    vllm_config: VllmConfig
    device: torch.device
    kernels: dict[int, Kernels]
    counters: Counters
    found: ModelLayers
    rules: dict[int, LogitRules]
    rotaries: dict[int, RotaryTable | None]
    sinks: SinkFlags | None
    positions: PositionLayer | None
    _last_queries: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def last_query(self, window: int | None) -> torch.Tensor:
        """See `select.recency.last_query_table`; one tensor for all layers with the same window."""
        if window not in self._last_queries:
            max_len = self.vllm_config.model_config.max_model_len
            self._last_queries[window] = last_query_table(self.settings, max_len, window).to(self.device)
        return self._last_queries[window]

    def heads(self, layer: Attention) -> slice:
        """KV heads of this tensor-parallel rank; with more ranks than heads, ranks share a head, as in vLLM."""
        num_kv_heads, heads_here = self.codebook.header.model.num_kv_heads, layer.num_kv_heads
        rank, world_size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        first = rank * heads_here if num_kv_heads >= world_size else rank * num_kv_heads // world_size
        return slice(first, first + heads_here)


def _attach_layer(index: int, layout: PageLayout, shared: _Shared) -> None:
    layer, rules, codebook = shared.found.every[index], shared.rules[index], shared.codebook
    device, dtype = shared.device, shared.vllm_config.model_config.dtype
    scheduler_config = shared.vllm_config.scheduler_config
    companion = RecencyLayer(layout, layer.num_kv_heads, dtype, shared.settings, rules.window)
    name = recency_layer_name(layer.layer_name)
    shared.vllm_config.compilation_config.static_forward_context[name] = companion
    heads = shared.heads(layer)
    # As the file has them where kernels can read that: a second copy at 4,096 centroids is over a gigabyte.
    on_gpu = shared.kernels[index].on_gpu
    held_in = torch.float16 if on_gpu else torch.float32
    order = codebook.header.k_order(index)
    setup = LayerSetup(
        config=shared.settings,
        preset=layout.preset,
        k_centroids=served(codebook.k[index][heads].to(device, held_in)),
        v_centroids=served(codebook.v[index][heads].to(device, held_in)),
        k_order=None if order is None else torch.tensor(order, dtype=torch.int32, device=device),
        rotary=shared.rotaries[index],
        jensen_weights=_jensen_weights(index, shared),
        last_query=shared.last_query(rules.window),
        num_heads=layer.num_heads,
        rules=rules,
        counters=shared.counters,
        # It counts tokens, sinks and anchors for all: it is behind the layer that reveals the sinks.
        counts_rows=index == max(shared.found.coded),
        max_num_reqs=scheduler_config.max_num_seqs,
        scratch=Workspace(),
        varlen=flash_attention(layer.head_size, dtype, scheduler_config.max_num_batched_tokens) if on_gpu else None,
    )
    rule, indices = codebook.header.sinks, codebook.header.model.decoder_indices
    _impl(layer).attachment = Attachment(
        setup=setup,
        layout=layout,
        source=None,
        sinks=shared.sinks if rule is not None and indices[index] > rule.layer else None,
        recency_name=name,
        recency=companion,
        positions=shared.positions,
        stores_positions=shared.positions is not None and index == min(shared.found.coded),
        kernels=shared.kernels[index],
    )
    set_spec(layer, vq_spec(layout, layer.num_kv_heads, rules.window))


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
    companion = PositionLayer(of_step, engine_plan(vllm_config).blocks.num_pages)
    name = position_layer_name(found.every[min(found.coded)].layer_name)
    vllm_config.compilation_config.static_forward_context[name] = companion
    return companion


def _attach_reader(index: int, shared: _Shared) -> None:
    """Let a layer without a cache of its own read that of its source."""
    source = _impl(shared.found.every[shared.found.source(index)])
    attachment = source.attachment
    assert attachment is not None
    source.is_read = True
    weights = _jensen_weights(index, shared)
    setup = replace(attachment.setup, rules=shared.rules[index], counts_rows=False, jensen_weights=weights)
    _impl(shared.found.every[index]).attachment = replace(
        attachment, setup=setup, source=source, stores_positions=False, kernels=shared.kernels[index]
    )


def _scale_rows(index: int, shared: _Shared) -> None:
    """The queries of a layer and the K that they read, where the codebook says so."""
    layer, k_scale = shared.found.every[index], shared.codebook.k_scale
    if k_scale is not None:
        scale = k_scale[shared.found.source(index), shared.heads(layer)]
        scale_rows(layer, scale, shared.device, shared.vllm_config.model_config.dtype)


def _jensen_weights(index: int, shared: _Shared) -> torch.Tensor:
    """See `LayerSetup`, for the queries of a layer and the K that they read."""
    layer, source, codebook = shared.found.every[index], shared.found.source(index), shared.codebook
    if codebook.k_errors is None:
        return torch.zeros(layer.num_heads, layer.head_size, device=shared.device)
    errors, scale = codebook.k_errors[source, shared.heads(layer)], shared.rules[index].scale
    return jensen_weights(errors, layer.num_heads, scale, shared.rotaries[source]).to(shared.device)
