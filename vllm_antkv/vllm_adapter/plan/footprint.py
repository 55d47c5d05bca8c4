"""What the engine says of its own footprint at start-up."""

from collections.abc import Iterator

import torch

from vllm_antkv.cache.pages import pool_block_bytes
from vllm_antkv.presets import nominal_bits
from vllm_antkv.vllm_adapter.plan.engine_plan import EnginePlan

#: Where codes make a request smaller by less, a cache of more bits hardly makes it larger.
_WORTH_CODES = 1.5


def describe(plan: EnginePlan, kv_cache_dtype: str) -> Iterator[str]:
    """Lines for the log: nominal and effective bits, with their parts, and what drafts and states add to a request."""
    cost, itemsize = plan.footprint, getattr(torch, plan.dtype).itemsize
    of_exact = f" + exact layers {cost.bits(cost.exact):.3f}" if cost.exact else ""
    yield (
        f"{kv_cache_dtype}: {nominal_bits(plan.presets):.4g} nominal bits per element, {cost.bits(cost.total):.3f} "
        f"effective at {cost.length} tokens = codes {cost.bits(cost.codes):.3f} + anchors {cost.bits(cost.anchors):.3f}"
        f" + recent and prefix rows {cost.bits(cost.recency):.3f}{of_exact} + padding {cost.bits(cost.padding):.3f} "
        f"({8 * itemsize} bits with auto)"
    )
    if plan.blocks.draft_bytes:
        of_codes = sum(layout.vq_page_bytes for layout in plan.layouts)
        times = plan.blocks.draft_bytes / of_codes
        yield f"What drafts is not coded: its cache takes {times:.1f} times what the codes take."
    if plan.states is not None:
        of_states = plan.states.request_bytes(pool_block_bytes(plan.layouts))
        of_auto = cost.elements * itemsize + plan.states.all_bytes
        gain = of_auto / (cost.total + of_states)
        yield (
            f"Layers with a state take {of_states / (cost.total + of_states):.0%} of a request of {cost.length} tokens "
            f"and are not coded: it takes {gain:.1f} times less than with auto, in blocks of {plan.blocks.num_tokens} "
            "tokens."
        )
        if gain < _WORTH_CODES:
            yield "For requests this short, take a preset of more bits, or fp8: they take hardly more."
