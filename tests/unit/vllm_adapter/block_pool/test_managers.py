"""What an unknown vLLM might ask of the manager of recency pages ends with an error, not with wrong pages."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from tests.recency_spec import made_spec
from vllm_antkv.vllm_adapter.block_pool.managers import RecencyManager


@pytest.fixture
def manager() -> RecencyManager:
    pool = BlockPool(100, enable_caching=False, hash_block_size=8)
    return RecencyManager(
        made_spec(), block_pool=pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=128
    )


def count(manager: RecencyManager, num_tokens: int) -> int:
    return manager.get_num_blocks_to_allocate("r", num_tokens, [], 0, 0, num_tokens)


def test_other_pages_than_counted_are_refused(manager, refused):
    count(manager, 20)
    with refused(RuntimeError, "28 tokens of request r behind 0 pages", "not for 20 behind 0", "0.32.x"):
        manager.allocate_new_blocks("r", 28, 28)
    assert not manager.req_to_blocks["r"]


def test_pages_that_nobody_counted_are_refused(manager, refused):
    with refused(RuntimeError, "20 tokens of request r"):
        manager.allocate_new_blocks("r", 20, 20)


def test_a_hit_for_a_request_with_pages_is_refused(manager, refused):
    count(manager, 20)
    manager.allocate_new_blocks("r", 20, 20)
    with refused(RuntimeError, "hit for request r", "3 pages"):
        manager.add_local_computed_blocks("r", [], 0, 0)


@pytest.mark.parametrize("num_real", [0, 3, 30])
def test_a_hit_is_a_part_of_the_most_that_a_request_is_admitted_with(manager, num_real):
    """A request that fits alone is admitted behind a hit, too: else it waits forever."""
    manager.max_admission_blocks_per_request = 34
    pages = [manager.block_pool.null_block] * 40 + manager.block_pool.free_block_queue.get_all_free_blocks()[:num_real]
    assert manager.get_num_blocks_to_allocate("r", 2000, pages, 320, 320, 2000, apply_admission_cap=True) == 34


def test_hits_of_sequences_that_ranks_share_are_refused(manager, refused):
    with refused(RuntimeError, "shared by 2 ranks"):
        RecencyManager.find_longest_cache_hit(
            [], 256, [0], manager.block_pool, manager.kv_cache_spec, False, 128, dcp_world_size=2
        )
