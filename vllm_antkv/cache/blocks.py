"""How many VQ pages of a layer lie in a block of the pool, where other layers keep a state.

vLLM's pool has blocks of one size for everything. A state is as large as the codes of many tokens: a block with one VQ
page of each layer would be mostly empty. This module imports no vLLM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import PageLayout, pool_block_bytes
from vllm_antkv.cache.pool_blocks import BlockPlan
from vllm_antkv.config import AntKVConfig

#: Prefix-cache hits end at the edges of blocks: more pages must save so much of a request.
_WORTH_LONGER_BLOCKS = 0.03
_MAX_PAGES = 40
#: Each group of layers has a block table, which costs time in every step.
_MAX_STATE_GROUPS = 38
#: Of a request to plan for, at most.
_MAX_LENGTH = 32768


@dataclass(frozen=True)
class States:
    """The layers of a model that keep a state, whether they attend too or not.

    num_layers: of them.
    num_bytes: of the state of one, per KV head of the layers that attend.
    per_request: states of a layer that a request holds at once.
    """

    num_layers: int
    num_bytes: int
    per_request: int

    @property
    def all_bytes(self) -> int:
        """Of the states of a request themselves, per KV head."""
        return self.per_request * self.num_layers * self.num_bytes

    def num_groups(self, block_bytes: int) -> int:
        """Block tables that vLLM gives them, in blocks of so many bytes per KV head."""
        return -(-self.num_layers // max(block_bytes // self.num_bytes, 1))

    def request_bytes(self, block_bytes: int) -> int:
        """Bytes of the blocks with the states of a request, per KV head."""
        return self.per_request * self.num_groups(block_bytes) * block_bytes


def plan_blocks(
    layouts_of: Callable[[BlockPlan], Sequence[PageLayout]], settings: AntKVConfig, states: States | None, length: int
) -> BlockPlan:
    """The blocks with the fewest pages in which a request takes hardly more bytes than in the best ones.

    Args:
        layouts_of: those of the layers with codes, for a plan.
        settings: the antkv settings.
        states: None: all layers attend, and a block has a page of each.
        length: tokens of the longest request.
    """
    if states is None:
        return BlockPlan()
    costs: dict[BlockPlan, tuple[bool, int]] = {}
    for num_pages in range(1, _MAX_PAGES + 1):
        plan = BlockPlan(num_pages, states.num_bytes)
        layouts = layouts_of(plan)
        block = pool_block_bytes(layouts)
        cost = footprint(layouts, settings, min(length, _MAX_LENGTH)).total + states.request_bytes(block)
        costs[plan] = states.num_groups(block) > _MAX_STATE_GROUPS, cost
    has_many_groups, least = min(costs.values())
    limit = (has_many_groups, int(least * (1 + _WORTH_LONGER_BLOCKS)))
    return next(plan for plan, cost in costs.items() if cost <= limit)
