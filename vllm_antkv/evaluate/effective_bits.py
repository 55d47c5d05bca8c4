"""Bits per K or V element that a method takes, everything counted: in the engine's pages, or as its paper stores it."""

from collections.abc import Sequence
from typing import cast

import torch

from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import page_layouts
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.laboratory.base import CountedQuantiser
from vllm_antkv.offline.method import Method

#: Of a full-precision element in a paper's cache, whatever the checkpoint is stored in.
FULL_BITS = 16.0


def effective_bits(
    method: Method,
    identity: ModelIdentity,
    dtype: torch.dtype,
    context: int,
    windows: Sequence[int | None] = (),
) -> float:
    """Bits held for one sequence of `context` tokens once it is computed, over its K and V elements.

    Counts codes, anchor rows and their offsets, recency and prefix rows, Anchor Scores, unfilled pages and padding, as
    the engine logs it at start-up. Codebooks are per model, not per token, and are quoted apart. A method that the
    engine does not page is counted as its paper stores it, without pages or padding and with full precision at 16 bits.

    Args:
        method: the method.
        identity: sizes of the model; every KV head of a layer costs the same.
        dtype: of full-precision rows.
        context: tokens in the sequence.
        windows: of every layer, None for one without; empty: none has one. Elements are then those that a query sees.
    """
    if not method.layers:
        return _as_stored(method, identity, context)
    layouts = page_layouts(method.config, method.layers, identity.head_size, dtype)
    cost = footprint(layouts, method.config, context, windows)
    return cost.bits(cost.total)


def _as_stored(method: Method, identity: ModelIdentity, context: int) -> float:
    """Rows that the next query will see exactly are stored at 16 bits, all others as what the quantiser stores."""
    if method.eviction is not None:
        return FULL_BITS * method.eviction.kept(context) / context
    if method.retention is None:
        return method.nominal_bits
    coded = cast(CountedQuantiser, method.quantiser).element_bits(identity, context)
    total = 0.0
    for until, bits in zip(method.retention.tables(context), coded, strict=True):
        exact = float((until >= context).sum())
        if method.sinks is not None:
            layers = sum(index > method.sinks.layer for index in identity.decoder_indices)
            exact += min(method.num_sinks, context - exact) * layers / identity.num_layers
        total += exact * FULL_BITS + (context - exact) * bits
    return total / (2 * context)
