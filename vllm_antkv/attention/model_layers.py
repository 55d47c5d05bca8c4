"""The layers of a loaded model: those with attention, which must fit the codebook, and decoder layers around them."""

from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_antkv.attention.impl import AntKVImpl
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.errors import UnsupportedModelError


def attention_layers(model: nn.Module, identity: ModelIdentity) -> dict[int, Attention]:
    """Every attention layer of the decoder by its index.

    Args:
        identity: of the model that the codebook was learned from.

    Raises:
        UnsupportedModelError: they are not those that the codebook was learned for.
    """
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    for module in modules:
        if not isinstance(module.impl, AntKVImpl):
            raise UnsupportedModelError(
                f"{module.layer_name} takes no --kv-cache-dtype: serve this model with --kv-cache-dtype auto."
            )
    found = {extract_layer_index(module.layer_name): module for module in modules}
    if sorted(found) != list(range(identity.num_layers)):
        raise UnsupportedModelError(
            f"{len(found)} of the model's {identity.num_layers} layers have attention with a KV cache, and "
            "an antkv cache needs one in all: serve this model with --kv-cache-dtype auto."
        )
    num_kv_heads = max(1, identity.num_kv_heads // get_tensor_model_parallel_world_size())
    for layer in found.values():
        if (layer.num_kv_heads, layer.head_size) != (num_kv_heads, identity.head_size):
            raise UnsupportedModelError(
                f"{layer.layer_name} has {layer.num_kv_heads} KV heads of {layer.head_size} channels, and the codebook "
                f"{num_kv_heads} of {identity.head_size}: serve this model with --kv-cache-dtype auto."
            )
    return dict(sorted(found.items()))


def decoder_layer(model: nn.Module, layer: Attention) -> nn.Module:
    """The decoder layer that an attention layer is part of."""
    name = next(name for name, module in model.named_modules() if module is layer)
    index = str(extract_layer_index(layer.layer_name))
    parts = name.split(".")
    return model.get_submodule(".".join(parts[: parts.index(index) + 1]))
