"""The layers of a loaded model: those with attention, which must fit the codebook, and decoder layers around them."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.vllm_adapter.block_pool.specs import exact_spec
from vllm_antkv.vllm_adapter.step.impl import AntKVImpl


@dataclass(frozen=True)
class ModelLayers:
    """The attention layers of a decoder, in a pipeline those of this stage.

    every: all of them by their indices, in order. An index counts the model's layers that attend, as in a codebook.
    coded: indices of those with codes of their own.
    exact: indices of those that vLLM's own attention serves (`--kv-cache-dtype-skip-layers`).
    sources: of each layer without a cache of its own, the one whose cache it reads.
    """

    every: dict[int, Attention]
    coded: tuple[int, ...]
    exact: tuple[int, ...]
    sources: dict[int, int]

    @property
    def ours(self) -> dict[int, Attention]:
        """Those that read codes, their own or another's."""
        return {index: layer for index, layer in self.every.items() if index not in self.exact}

    def source(self, index: int) -> int:
        """The layer whose cache a layer reads: itself, or another."""
        return self.sources.get(index, index)


def attention_layers(model: nn.Module, identity: ModelIdentity, skipped: Collection[int] = ()) -> ModelLayers:
    """Every attention layer of the decoder.

    Args:
        identity: of the model that the codebook was learned from.
        skipped: indices of the decoder layers that stay exact.

    Raises:
        UnsupportedModelError: they are not those that the codebook was learned for, or not all can be served.
    """
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    found = dict(sorted({extract_layer_index(module.layer_name): module for module in modules}.items()))
    stage = get_pp_group()
    first, end = get_pp_indices(identity.num_layers, stage.rank_in_group, stage.world_size)
    layers = _sorted_out(found, first)
    for index, layer in layers.every.items():
        if index in layers.exact and list(found)[layers.source(index) - first] not in skipped:
            raise UnsupportedModelError(
                f"{layer.layer_name} takes no --kv-cache-dtype: serve this model with --kv-cache-dtype auto."
            )
    # An encoder of sounds may have a cache too.
    if tuple(found) != identity.decoder_indices[first:end] or len(modules) != len(found):
        raise UnsupportedModelError(
            f"The model has {identity.num_layers} layers with attention by its config and {len(modules)} times "
            "attention with a KV cache, and an antkv cache needs it once in each: serve this model with "
            "--kv-cache-dtype auto."
        )
    num_kv_heads = max(1, identity.num_kv_heads // get_tensor_model_parallel_world_size())
    for layer in found.values():
        if (layer.num_kv_heads, layer.head_size) != (num_kv_heads, identity.head_size):
            raise UnsupportedModelError(
                f"{layer.layer_name} has {layer.num_kv_heads} KV heads of {layer.head_size} channels, and the codebook "
                f"{num_kv_heads} of {identity.head_size}: serve this model with --kv-cache-dtype auto."
            )
    return layers


def set_spec(layer: Attention, spec: KVCacheSpec) -> None:
    """Let vLLM give a layer such pages.

    It takes those of codes for pages of rows of the head size. The backend's `customize_spec` could say better if all
    layers had the same bits, but is not told which layer it is asked for.
    """
    layer.get_kv_cache_spec = lambda vllm_config: spec  # type: ignore[method-assign]


def leave_exact(layer: Attention, window: int | None = None) -> None:
    """Let the pages of a layer lie beside ours, in blocks that our layers have too; window: below which none stay.

    Of one that `--kv-cache-dtype-skip-layers` names, or of a model that drafts. vLLM gives it the backend of `auto`.
    """
    if current_platform.is_cpu():
        from vllm_antkv.vllm_adapter.step.packed_cpu import PackedCPUBackend

        layer.attn_backend = PackedCPUBackend
    set_spec(layer, exact_spec(layer.num_kv_heads, layer.head_size, layer.kv_cache_torch_dtype, window))


def outgrown_window(layer: Attention, max_model_len: int) -> int | None:
    """The layer's window, if a request can outgrow it."""
    window: int | None = layer.sliding_window
    return window if window is not None and window < max_model_len else None


def _sorted_out(found: dict[int, Attention], first: int) -> ModelLayers:
    every = dict(enumerate(found.values(), first))
    decoder_layer = dict(enumerate(found, first))
    exact = tuple(index for index, layer in every.items() if not isinstance(layer.impl, AntKVImpl))
    sources = {
        index: first + list(found).index(extract_layer_index(layer.kv_sharing_target_layer_name))
        for index, layer in every.items()
        if layer.kv_sharing_target_layer_name is not None
    }
    for index, source in sources.items():
        if (index in exact) != (source in exact):
            raise UnsupportedModelError(
                f"Layer {decoder_layer[index]} of this model reads the KV cache of layer {decoder_layer[source]}: name "
                "both in --kv-cache-dtype-skip-layers, or neither."
            )
    return ModelLayers(
        every=every,
        coded=tuple(index for index in every if index not in exact and index not in sources),
        exact=exact,
        sources=sources,
    )


def decoder_layers(model: nn.Module, layer: Attention) -> list[nn.Module]:
    """All decoder layers, of one of which this attention layer is part. Those of other stages have no parameters."""
    name = next(name for name, module in model.named_modules() if module is layer)
    index = str(extract_layer_index(layer.layer_name))
    parts = name.split(".")
    return list(model.get_submodule(".".join(parts[: parts.index(index)])).children())
