"""Where every modern Hugging Face model hands over queries, K and V: transformers' attention interface."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vllm_antkv.layer_windows import attention_layers


@dataclass(frozen=True)
class Attended:
    """One call of a layer's attention, as transformers makes it, and what came out.

    query, key, value: (num_windows, heads, num_tokens, head_size), K after RoPE and norms.
    options: what else the function was given: `scaling`, and windows, caps and sink logits where the layer has them.
    output: (num_windows, num_tokens, num_heads, head_size).
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: Mapping[str, Any]
    output: torch.Tensor


@contextmanager
def attention_watched(model: PreTrainedModel, watch: Callable[[Attended], None]) -> Iterator[None]:
    """While open, `watch` is called after every attention of `model`, which computes as it would without."""
    before = model.config._attn_implementation

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        # The eager function lies beside the model's classes.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own = ALL_ATTENTION_FUNCTIONS.get_interface(before, eager)
        results = own(module, query, key, value, *args, **options)
        watch(Attended(module, query, key, value, options, results[0]))
        return results

    with replaced(model, attend) as name:
        # Without a mask of its own the function would be given none at all.
        AttentionMaskInterface.register(name, AttentionMaskInterface._global_mapping[before])
        try:
            yield
        finally:
            del AttentionMaskInterface._global_mapping[name]


@contextmanager
def replaced(model: PreTrainedModel, attend: Callable[..., Any]) -> Iterator[str]:
    """While open, `attend`, with the signature of transformers' AttentionInterface, is the model's attention.

    Gives the name under which transformers knows it. The model's own attention comes back at the end.
    """
    name, before = f"antkv_offline_{id(attend)}", model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    model.set_attn_implementation(name)
    try:
        yield name
    finally:
        model.set_attn_implementation(before)
        del type(ALL_ATTENTION_FUNCTIONS)._global_mapping[name]


def layer_of(module: nn.Module) -> int:
    """The index of an attention module's layer among those that attend."""
    index, attending = int(module.layer_idx), attention_layers(module.config.get_text_config())  # type: ignore[arg-type, operator, union-attr]
    return index if attending is None else attending.index(index)
