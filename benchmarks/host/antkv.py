"""A layer of `antkv-1bit` on an H200 with a codebook as calibration makes it: all that costs a launch is there.

But for the scales of queries and K: those are part of the model's graph, for torch.compile to fuse with RoPE.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.workspace import init_workspace_manager, lock_workspace

from benchmarks.gpu.antkv_layer import layer_setup
from benchmarks.gpu.llama import HEAD_SIZE, SCALE
from benchmarks.host.driver import CountingBackend
from benchmarks.host.hopper import on_hopper
from benchmarks.host.step import DEVICE, DTYPE, GROUP, MAX_LEN, MAX_NUM_REQS, MAX_NUM_TOKENS, NUM_BLOCKS
from vllm_antkv.cache.pages import PageLayout, pool_block_bytes
from vllm_antkv.codebook import SinkRule
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.cuda import CudaOperations
from vllm_antkv.ops.dispatch import KERNELS
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.triton import TritonOperations
from vllm_antkv.presets import get_preset
from vllm_antkv.vllm_adapter.block_pool.specs import recency_spec, vq_spec
from vllm_antkv.vllm_adapter.step.flash_attention import flash_attention
from vllm_antkv.vllm_adapter.step.impl import AntKVImpl, Attachment
from vllm_antkv.vllm_adapter.step.layer import RecencyLayer
from vllm_antkv.vllm_adapter.step.metadata import RecencyMetadataBuilder, VQMetadataBuilder
from vllm_antkv.vllm_adapter.step.sinks import SinkFlags
from vllm_antkv.vllm_adapter.step.workspace import Workspace

PRESET = "antkv-1bit"


class AntKV:
    """The layer, and what vLLM does with it.

    block_sizes: tokens of a block, for each of its block tables.
    """

    def __init__(self, vllm_config: VllmConfig, num_kv_heads: int) -> None:
        settings = AntKVConfig()
        layout = PageLayout.of(settings, get_preset(PRESET), HEAD_SIZE, DTYPE)
        self.block_sizes: tuple[int, ...] = (VQ_BLOCK_SIZE, layout.recency_block_size)
        _reserve_workspace()
        shape = (NUM_BLOCKS, num_kv_heads, 1, pool_block_bytes([layout]))
        self._pages = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
        recency = RecencyLayer(layout, num_kv_heads, DTYPE, settings, None)
        recency.bind_kv_cache(self._pages[..., : layout.recency_page_bytes])
        self._impl = AntKVImpl(GROUP * num_kv_heads, HEAD_SIZE, SCALE, num_kv_heads, kv_cache_dtype=PRESET)
        # What start-up looks into is in memory.
        setup = layer_setup(settings, PRESET, num_kv_heads, MAX_LEN, MAX_NUM_REQS, "cpu")
        with on_hopper():
            varlen = flash_attention(HEAD_SIZE, DTYPE, MAX_NUM_TOKENS)
        assert varlen is not None
        self._impl.attachment = Attachment(
            setup=replace(setup, scratch=Workspace(), varlen=varlen),
            layout=layout,
            source=None,
            sinks=SinkFlags(SinkRule(layer=0, channels=(0,), threshold=1.0), MAX_NUM_TOKENS, DEVICE),
            recency_name="recency",
            recency=recency,
            positions=None,
            stores_positions=False,
            kernels=replace(next(each for each in KERNELS if each.name == "cuda"), build=_operations, on_gpu=False),
        )
        self._codes = self._pages[..., : layout.vq_page_bytes]
        context = vllm_config.compilation_config.static_forward_context
        context["layer"] = SimpleNamespace(impl=self._impl, kv_cache=self._codes)
        self._vllm_config, self._layer = vllm_config, SimpleNamespace()
        spec = vq_spec(layout, num_kv_heads)
        self._builder = VQMetadataBuilder(spec, ["layer"], vllm_config, DEVICE)
        recency_pages = recency_spec(layout, num_kv_heads, settings, vllm_config, None)
        self._recency_builder = RecencyMetadataBuilder(recency_pages, ["recency"], vllm_config, DEVICE)

    def plan(self, batches: Sequence[CommonAttentionMetadata]) -> dict[str, Any]:
        """Build the metadata of a step, of which there is a description for each block table."""
        codes, recency = batches
        return {"layer": self._builder.build(0, codes), "recency": self._recency_builder.build(0, recency)}

    def context(self, metadata: dict[str, Any]) -> AbstractContextManager[None]:
        """In which layers run."""
        return set_forward_context(metadata, self._vllm_config)

    def run(self, rows: StepRows, output: torch.Tensor, metadata: dict[str, Any]) -> None:
        """Run the layer."""
        self._impl.forward(self._layer, rows.query, rows.key, rows.value, self._codes, metadata["layer"], output)


@cache
def _reserve_workspace() -> None:
    """More than any layer takes: it is nobody's memory."""
    init_workspace_manager(DEVICE)
    with patch.object(torch.accelerator, "empty_cache", lambda: None):
        Workspace()(((1 << 40,), torch.uint8))
    lock_workspace()


def _operations(layer: LayerState) -> CudaOperations:
    return CudaOperations(layer, CountingBackend(), TritonOperations(layer, decodes=False))
