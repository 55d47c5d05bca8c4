"""Attention metadata: the step's plan and block tables, built once per step and shared by all layers."""

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.plan import StepPlan, StepPlanner


@dataclass
class VQMetadata(AttentionMetadata):
    """What an attention layer gets.

    plan: of the step.
    block_table: (num_reqs, max_blocks) int32 of the VQ pages.
    """

    plan: StepPlan
    block_table: torch.Tensor


@dataclass
class RecencyMetadata(AttentionMetadata):
    """What the recency companion of an attention layer gets.

    block_table: (num_reqs, max_pages) int32; 0 is the null block.
    """

    block_table: torch.Tensor


class VQMetadataBuilder(AttentionMetadataBuilder[VQMetadata]):
    """Plans the step for the layers that own VQ pages."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        config = AntKVConfig.from_additional_config(vllm_config.additional_config)
        self._planner = StepPlanner(config, vllm_config.model_config.max_model_len, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> VQMetadata:
        """Plan one step."""
        num_reqs = common_attn_metadata.num_reqs
        return VQMetadata(
            plan=self._planner.plan(
                common_attn_metadata.query_start_loc_cpu[: num_reqs + 1].tolist(),
                common_attn_metadata.seq_lens[:num_reqs].tolist(),
            ),
            block_table=common_attn_metadata.block_table_tensor[:num_reqs],
        )


class RecencyMetadataBuilder(AttentionMetadataBuilder[RecencyMetadata]):
    """Passes on the block table of the recency pages."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RecencyMetadata:
        """Take the block table of the step."""
        return RecencyMetadata(common_attn_metadata.block_table_tensor[: common_attn_metadata.num_reqs])
