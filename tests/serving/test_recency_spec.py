"""What vLLM decides for a sliding window must not be decided for recency pages: their first pages stay.

vLLM 0.33's model runner V2 sets what is below a window to null, in every group whose spec is a SlidingWindowSpec.
"""

import copy
import dataclasses

import pytest
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec, get_kv_cache_spec_sliding_window

from tests.recency_spec import made_spec
from vllm_antkv.vllm_adapter.block_pool.managers import RecencyManager
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec
from vllm_antkv.vllm_adapter.hooks.specs import MANAGER, SPEC


@pytest.fixture
def spec() -> RecencySpec:
    return made_spec(num_kv_heads=2)


PARENTS = [(SlidingWindowSpec, RecencySpec, SPEC), (SingleTypeKVCacheManager, RecencyManager, MANAGER)]


@pytest.mark.parametrize(("parent", "ours", "members"), PARENTS)
def test_what_says_which_pages_live_is_ours(parent, ours, members):
    # This one cannot be anything but 0: see below.
    for name in members.decided - {"extra_retained_tokens"}:
        assert name in vars(ours) or name in ours.__annotations__, name


def test_no_page_is_below_a_window(spec):
    assert spec.num_retained_tokens == 0
    assert get_kv_cache_spec_sliding_window(spec) == spec.max_len
    assert spec.retention.pages_at(spec.max_len)[0] == 0


def test_vllm_cannot_retain_more_than_was_decided(spec):
    """vLLM replaces this field in every SlidingWindowSpec, by 0 where there is no speculative decoding."""
    assert dataclasses.replace(spec, extra_retained_tokens=0) == spec
    with pytest.raises(ValueError, match="refused at start-up"):
        dataclasses.replace(spec, extra_retained_tokens=1)


def test_a_spec_is_the_same_in_another_process(spec):
    """Copied by the protocol that carries it there."""
    there = copy.deepcopy(spec)
    assert there == spec
    assert hash(there) == hash(spec)
