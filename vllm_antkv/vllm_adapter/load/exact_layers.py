"""Layers that stay exact, in vLLM's own attention and pages of vLLM's: those of `plan.skipped_layers`, and those of a
model that drafts.

vLLM itself gives such a layer the backend that it has with `auto`. What is decided here is how its pages go together
with ours.
"""

from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from vllm_antkv.vllm_adapter.block_pool.specs import exact_spec
from vllm_antkv.vllm_adapter.load.model_layers import set_spec


def leave_exact(layer: Attention, window: int | None = None) -> None:
    """Let the pages of a layer lie beside ours, in blocks that our layers have too; window: below which none stay."""
    if current_platform.is_cpu():
        from vllm_antkv.vllm_adapter.step.packed_cpu import PackedCPUBackend

        layer.attn_backend = PackedCPUBackend
    set_spec(layer, exact_spec(layer.num_kv_heads, layer.head_size, layer.kv_cache_torch_dtype, window))


def outgrown_window(layer: Attention, max_model_len: int) -> int | None:
    """The layer's window, if a request can outgrow it."""
    window: int | None = layer.sliding_window
    return window if window is not None and window < max_model_len else None
