"""Attention metadata: the plan of a step, made once, before any layer runs, and shared by all layers."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.ops.varlen import plan_rounds, prefill_limits
from vllm_antkv.vllm_adapter.step.pages import take_pages


@dataclass
class RecencyMetadata(AttentionMetadata):
    """What the recency companion of an attention layer gets.

    block_table: (num_reqs, max_pages) int32; 0 is the null block.
    """

    block_table: torch.Tensor


@dataclass
class VQMetadata(AttentionMetadata):
    """What an attention layer gets.

    num_tokens: new tokens of the step.
    slot_mapping: (num_tokens,) int64, where in the VQ pages they are (`cache.positions.store_positions`): pages follow
        each other, so that vLLM's slots in blocks are those in pages.
    plan: of the step, for layers without recency pages.
    """

    num_tokens: int
    slot_mapping: torch.Tensor
    plan: StepPlan
    _plans: list[StepPlan] = field(default_factory=list)

    def of_layer(self, recency: RecencyMetadata) -> StepPlan:
        """The plan with the block tables of both page classes: one for all layers that share them.

        Layers whose VQ pages share a block table may have several for their recency pages.
        """
        for plan in self._plans:
            if plan.recency_block_table is recency.block_table:
                return plan
        plan = replace(self.plan, recency_block_table=recency.block_table)
        self._plans.append(plan)
        return plan


def _attachments(vllm_config: VllmConfig) -> dict[str, Any]:
    """What the layers were given that read codes (`impl.Attachment`), by their names."""
    layers = vllm_config.compilation_config.static_forward_context
    found = {name: getattr(getattr(layer, "impl", None), "attachment", None) for name, layer in layers.items()}
    return {name: attachment for name, attachment in found.items() if attachment is not None}


def _cudagraph_support(vllm_config: VllmConfig) -> AttentionCGSupport:
    """CUDA graphs hold steps in which every request has one new token, or all drafts that it may have behind it.

    Everything about these is in tensors.
    """
    if not any(attachment.kernels.on_gpu for attachment in _attachments(vllm_config).values()):
        return AttentionCGSupport.NEVER
    drafts = vllm_config.num_speculative_tokens > 0
    return AttentionCGSupport.UNIFORM_BATCH if drafts else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class VQMetadataBuilder(AttentionMetadataBuilder[VQMetadata]):
    """Plans a step for the layers that own VQ pages."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        attachments = _attachments(vllm_config)
        ours = [attachments[name] for name in layer_names]
        self._layers = vllm_config.compilation_config.static_forward_context
        self._first, self._device = self._layers[layer_names[0]], device
        limits = {limits for each in ours if (limits := prefill_limits(each.setup, each.layout.score_slots))}
        assert len(limits) <= 1, "layers of a model are planned for alike"
        self._limits = next(iter(limits), None)
        self._counters = next((each.setup.counters for each in ours if each.setup.counts_rows), None)
        self._pages = torch.arange(kv_cache_spec.block_size // VQ_BLOCK_SIZE, dtype=torch.int32, device=device)
        self._max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self._block_table: torch.Tensor | None = None
        self._no_pages = self._pages.new_empty(0, 0)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """What the kernels that run here can do."""
        return _cudagraph_support(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> VQMetadata:
        """Plan the step.

        Steps are counted here, on the host: a CUDA graph that is replayed calls nothing else of ours.
        """
        if self._counters is not None:
            self._counters.count_step(common_attn_metadata.num_actual_tokens)
        return self._metadata(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> VQMetadata:
        """As `build`, for a step that is not counted."""
        return self._metadata(common_attn_metadata)

    def _metadata(self, common_attn_metadata: CommonAttentionMetadata) -> VQMetadata:
        if self._first.impl.pages is not self._first.kv_cache:
            # vLLM may compute steps with the pages of a trial, to learn how much memory CUDA graphs take.
            take_pages(self._layers)
        num_tokens = common_attn_metadata.num_actual_tokens
        return VQMetadata(
            num_tokens=num_tokens,
            slot_mapping=common_attn_metadata.slot_mapping[:num_tokens],
            plan=self._plan(common_attn_metadata),
        )

    def _plan(self, common_attn_metadata: CommonAttentionMetadata) -> StepPlan:
        num_reqs, max_query_len = common_attn_metadata.num_reqs, common_attn_metadata.max_query_len
        is_prefilling = common_attn_metadata.is_prefilling
        query_start_loc_cpu = common_attn_metadata.query_start_loc_cpu[: num_reqs + 1]
        # Exact but for drafts of asynchronous scheduling, for which nothing is planned.
        seq_lens_cpu, limits = common_attn_metadata.seq_lens_cpu_upper_bound, self._limits
        rounds = None
        if limits is not None and seq_lens_cpu is not None and max_query_len > limits.longest_decode:
            rounds = plan_rounds(query_start_loc_cpu, seq_lens_cpu[:num_reqs], limits, self._device)
        return StepPlan(
            query_start_loc=common_attn_metadata.query_start_loc[: num_reqs + 1],
            seq_lens=common_attn_metadata.seq_lens[:num_reqs],
            vq_block_table=self._of_pages(common_attn_metadata.block_table_tensor[:num_reqs]),
            recency_block_table=self._no_pages,
            max_query_len=max_query_len,
            max_seq_len=common_attn_metadata.max_seq_len,
            is_prefilling=None if is_prefilling is None else is_prefilling[:num_reqs],
            query_start_loc_cpu=query_start_loc_cpu,
            rounds=rounds,
        )

    def _of_pages(self, block_table: torch.Tensor) -> torch.Tensor:
        """The pages in a table's blocks (`cache.pool_blocks.one_by_one`), where CUDA graphs read them."""
        num_reqs, num_pages = len(block_table), len(self._pages)
        if num_pages == 1:
            return block_table
        if self._block_table is None:
            self._block_table = block_table.new_zeros(self._max_num_reqs, block_table.shape[1], num_pages)
        torch.add(self._pages, block_table[:, :, None], alpha=num_pages, out=self._block_table[:num_reqs])
        return self._block_table[:num_reqs].flatten(1)


class RecencyMetadataBuilder(AttentionMetadataBuilder[RecencyMetadata]):
    """Passes on the block table of the recency pages."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """As for the layers that own VQ pages: vLLM takes the weakest of all."""
        return _cudagraph_support(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RecencyMetadata:
        """Take the block table of the step."""
        return RecencyMetadata(common_attn_metadata.block_table_tensor[: common_attn_metadata.num_reqs])
