"""What an engine with an antkv cache is: decided once, in the process that the user starts, and known to all others.

It travels in vLLM's `additional_config`, in place of the settings from which it was made: vLLM hands that to every
process, and makes it part of its compile cache's key.
"""

from collections.abc import Iterator
from functools import cached_property, lru_cache

import torch
from pydantic import BaseModel
from vllm.config import VllmConfig

from vllm_antkv import __version__
from vllm_antkv.cache.blocks import States
from vllm_antkv.cache.footprint import Footprint, footprint
from vllm_antkv.cache.pages import PageLayout, page_layouts, pool_block_bytes
from vllm_antkv.cache.pool_blocks import BlockPlan
from vllm_antkv.config import SETTINGS_KEY, AntKVConfig
from vllm_antkv.presets import LAYER_PRESETS, Preset, nominal_bits

#: Of the request that a footprint is told for, at most.
_MAX_LENGTH = 8192
#: Where codes make a request smaller by less, a cache of more bits hardly makes it larger.
_WORTH_CODES = 1.5


class ServedCodebook(BaseModel, frozen=True):
    """The codebook file chosen at start-up; num_bytes: of its centroids."""

    path: str
    identity: str
    num_bytes: int


class EnginePlan(BaseModel, frozen=True):
    """The plan.

    settings: the user's, completed.
    layers: name of the preset of every layer that has codes.
    exact: indices of the decoder layers that `--kv-cache-dtype-skip-layers` names.
    windows, exact_windows: of these layers; None: a layer without one, or one that no request outgrows.
    blocks: what a block of the pool holds.
    states: of the layers that keep one; None: there are none.
    head_size: channels. dtype: of the model, as torch calls it.
    max_model_len: tokens of the longest request.
    position_bytes: of M-RoPE, as in `cache.pages.pool_block_bytes`.
    version: of this package. What vLLM compiled with another one is not used: part of it is ours (`step.key_scales`).
    """

    settings: AntKVConfig
    codebook: ServedCodebook
    layers: tuple[str, ...]
    exact: tuple[int, ...]
    windows: tuple[int | None, ...]
    exact_windows: tuple[int | None, ...]
    blocks: BlockPlan
    states: States | None
    head_size: int
    dtype: str
    max_model_len: int
    position_bytes: int
    version: str = __version__

    @cached_property
    def presets(self) -> list[Preset]:
        """Of every layer that has codes."""
        return [LAYER_PRESETS[name] for name in self.layers]

    @cached_property
    def layouts(self) -> list[PageLayout]:
        """Of the pages of every layer that has codes."""
        dtype = getattr(torch, self.dtype)
        return page_layouts(self.settings, self.presets, self.head_size, dtype, plan=self.blocks)

    @cached_property
    def footprint(self) -> Footprint:
        """The cost of 8192 tokens, or of the longest request if that is shorter."""
        length = min(_MAX_LENGTH, self.max_model_len)
        return footprint(self.layouts, self.settings, length, self.windows, self.exact_windows, self.position_bytes)

    def carried_by(self, vllm_config: VllmConfig) -> None:
        """Let a configuration carry the plan."""
        plan = {SETTINGS_KEY: self.model_dump_json()}
        vllm_config.additional_config = vllm_config.additional_config | plan


def engine_plan(vllm_config: VllmConfig) -> EnginePlan:
    """The plan that a configuration carries."""
    return _read(vllm_config.additional_config[SETTINGS_KEY])


@lru_cache(maxsize=1)
def _read(plan: str) -> EnginePlan:
    return EnginePlan.model_validate_json(plan)


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
