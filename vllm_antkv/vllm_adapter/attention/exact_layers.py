"""Layers that stay exact, in vLLM's own attention and pages of vLLM's: those that `--kv-cache-dtype-skip-layers` names,
and those of a model that drafts.

vLLM itself gives such a layer the backend that it has with `auto`. What is decided here is how its pages go together
with ours, and that nothing is skipped that cannot be.
"""

from collections.abc import Sequence

from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError
from vllm_antkv.vllm_adapter.attention.model_layers import set_spec
from vllm_antkv.vllm_adapter.block_pool.specs import exact_spec

#: What vLLM calls all layers with a sliding window.
_WINDOWS = "sliding_window"


def read_skipped(
    words: Sequence[str], layers: Sequence[int], settings: AntKVConfig
) -> tuple[tuple[int, ...], AntKVConfig]:
    """The layers that are named by their index, and the settings that keep those exact which are named by their kind.

    Args:
        words: values of `--kv-cache-dtype-skip-layers`.
        layers: indices of the decoder layers that attend.
        settings: of the user.

    Raises:
        SettingsError: a word names no layer, or all layers are named.
    """
    for word in words:
        if word != _WINDOWS and word not in map(str, layers):
            raise SettingsError(
                f"--kv-cache-dtype-skip-layers names {word!r}, which is neither a layer of this model that "
                f"attends ({layers[0]} to {layers[-1]}) nor {_WINDOWS}: leave it out."
            )
    skipped = tuple(sorted({int(word) for word in words if word != _WINDOWS}))
    if len(skipped) == len(layers):
        raise SettingsError("--kv-cache-dtype-skip-layers names all layers: use --kv-cache-dtype auto.")
    if _WINDOWS in words:
        # Few rows of a window are needed at a time: recency pages hold them in less memory than pages of all tokens.
        settings = settings.model_copy(update={"windows": "exact"})
    return skipped, settings


def leave_exact(layer: Attention, window: int | None = None) -> None:
    """Let the pages of a layer lie beside ours, in blocks that our layers have too; window: below which none stay."""
    if current_platform.is_cpu():
        from vllm_antkv.vllm_adapter.attention.packed_cpu import PackedCPUBackend

        layer.attn_backend = PackedCPUBackend
    set_spec(layer, exact_spec(layer.num_kv_heads, layer.head_size, layer.kv_cache_torch_dtype, window))


def outgrown_window(layer: Attention, max_model_len: int) -> int | None:
    """The layer's window, if a request can outgrow it."""
    window: int | None = layer.sliding_window
    return window if window is not None and window < max_model_len else None
