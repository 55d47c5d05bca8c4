"""Bits per K or V element that a method takes, everything counted: in the engine's pages, or as the method says."""

from collections.abc import Sequence

import torch

from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import page_layouts
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.offline.method import Method


def effective_bits(
    method: Method, identity: ModelIdentity, dtype: torch.dtype, context: int, windows: Sequence[int | None] = ()
) -> float:
    """Bits held for one sequence of `context` tokens once it is computed, over its K and V elements.

    Counts codes, anchor rows and their offsets, recency and prefix rows, Anchor Scores, unfilled pages and padding, as
    the engine logs it at start-up, without codebooks. A method that it does not page counts itself (`stored_bits`).

    Args:
        method: the method.
        identity: sizes of the model; every KV head of a layer costs the same.
        dtype: of full-precision rows.
        context: tokens in the sequence.
        windows: of every layer, None for one without; empty: none has one. Elements are those that a query sees.
    """
    if not method.layers:
        seen = [min(context, window or context) for window in windows or [None]]
        return sum(tokens * method.stored_bits(identity, context, tokens) for tokens in seen) / sum(seen)
    layouts = page_layouts(method.config, method.layers, identity.head_size, dtype)
    cost = footprint(layouts, method.config, context, windows)
    return cost.bits(cost.total)
