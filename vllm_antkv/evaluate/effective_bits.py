"""Bits per K or V element that the serving engine's pages really take, everything counted."""

import torch

from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.evaluate.methods.base import Method


def effective_bits(method: Method, identity: ModelIdentity, dtype: torch.dtype, context: int) -> float:
    """Bits held for one sequence of `context` tokens once it is computed, over its K and V elements.

    Counts codes, anchor rows and their offsets, recency and prefix rows, Anchor Scores, unfilled pages and padding, as
    the engine logs it at start-up. Codebooks are per model, not per token, and are quoted apart.

    Args:
        method: the nominal bits are returned as they are for one that the engine does not page.
        identity: sizes of the model; every KV head of every layer costs the same.
        dtype: of full-precision rows.
        context: tokens in the sequence.
    """
    if method.preset is None:
        return method.nominal_bits
    layout = PageLayout.of(method.config, method.preset, identity.head_size, dtype)
    cost = footprint(layout, method.config, context)
    return cost.bits(cost.total)
