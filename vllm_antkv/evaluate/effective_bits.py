"""Bits per K or V element that the serving engine's pages really take, everything counted."""

import torch

from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.evaluate.methods import Method
from vllm_antkv.select.recency import last_use_table


def effective_bits(method: Method, identity: ModelIdentity, dtype: torch.dtype, context: int) -> float:
    """Bits held for one sequence of about `context` tokens, over the K and V elements of its tokens.

    Counts codes, anchor rows and their offsets, recency and prefix rows, Anchor Scores, unfilled and padded pages;
    codebooks are per model, not per token, and are quoted apart. The open block fills and empties as a sequence grows,
    so the figure is the mean over the last block's worth of lengths, not its best moment.

    Args:
        method: the nominal bits are returned as they are for one that the engine does not page.
        identity: sizes of the model; every KV head of every layer costs the same.
        dtype: of full-precision rows.
        context: tokens in the sequence.
    """
    if method.preset is None:
        return method.nominal_bits
    layout = PageLayout.of(method.config, method.preset, identity.head_size, dtype)
    size = layout.recency_block_size
    last_use = last_use_table(method.config, -(-context // size) * size)
    last_use_of_page = last_use.view(-1, size).amax(1)
    first_token = torch.arange(len(last_use_of_page)) * size
    lengths = range(max(context - VQ_BLOCK_SIZE, 0) + 1, context + 1)
    bits = 0.0
    for length in lengths:
        recency_pages = int(((first_token < length) & (last_use_of_page >= length)).sum())
        vq_pages = -(-length // VQ_BLOCK_SIZE)
        held = vq_pages * layout.vq_page_bytes + recency_pages * layout.recency_page_bytes
        bits += 8 * held / (2 * identity.head_size * length)
    return bits / len(lengths)
