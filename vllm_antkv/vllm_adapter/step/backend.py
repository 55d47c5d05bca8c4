"""The two backends that vLLM knows: one for attention layers with VQ pages, one for their recency companions."""

from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.step.impl import AntKVImpl
from vllm_antkv.vllm_adapter.step.metadata import RecencyMetadataBuilder, VQMetadataBuilder

#: Member of vLLM's AttentionBackendEnum, and name that the layers report.
BACKEND_NAME = "ANTKV"
SUPPORTED_HEAD_SIZES = (32, 64, 80, 96, 128, 256)


class _Backend(AttentionBackend):
    """What both are called and how their pages lie."""

    @staticmethod
    def get_name() -> str:
        """Member of AttentionBackendEnum."""
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[AntKVImpl]:
        """What an Attention layer runs, which reads the recency pages too."""
        return AntKVImpl

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Block outermost: pages of different sizes lie side by side in a pool block."""
        return (KVCacheLayout.BLHNC,)


class AntKVBackend(_Backend):
    """Attention over VQ pages and recency pages."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(PRESETS)  # type: ignore[assignment]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_builder_cls() -> type[VQMetadataBuilder]:
        """What plans the steps."""
        return VQMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Blocks are never split: the metadata has the pages in them."""
        return [MultipleOf(VQ_BLOCK_SIZE)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The VQ block, whatever the platform's default."""
        return VQ_BLOCK_SIZE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes that are tested."""
        return list(SUPPORTED_HEAD_SIZES)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Pages past the window are freed."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned logits that take part in every softmax."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Ours does; others are refused."""
        return True


class RecencyBackend(_Backend):
    """Recency pages have no attention of their own; this tells vLLM how to lay them out."""

    @staticmethod
    def get_builder_cls() -> type[RecencyMetadataBuilder]:
        """What passes on the block table."""
        return RecencyMetadataBuilder
