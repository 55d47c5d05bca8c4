"""Gives layers their pages when vLLM has allocated some, and takes those of a trial away again."""

from collections.abc import Mapping
from typing import Any

import torch


@torch.inference_mode()
def take_pages(layers: Mapping[str, Any]) -> None:
    """Give all layers the pages that vLLM bound to them, before the first of them stores a token.

    Layers share the blocks of the pool, and kernels that are warmed up leave some dirty: those of other layers, too.

    Args:
        layers: vLLM's static forward context.
    """
    for impl, layer in _attached(layers):
        if layer.kv_cache.numel():
            impl.take_pages(layer.kv_cache)


def let_pages_go(layers: Mapping[str, Any]) -> None:
    """Hold none of them any longer: vLLM is about to allocate others. layers: as in `take_pages`."""
    for impl, _ in _attached(layers):
        impl.let_pages_go()
        impl.attachment.recency.let_pages_go()
        if impl.attachment.positions is not None:
            impl.attachment.positions.let_pages_go()


def _attached(layers: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """What the layers run that read codes (`impl.AntKVImpl`), each with its layer."""
    found = [(getattr(layer, "impl", None), layer) for layer in layers.values()]
    return [(impl, layer) for impl, layer in found if getattr(impl, "attachment", None) is not None]
