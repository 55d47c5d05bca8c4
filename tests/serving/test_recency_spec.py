"""What vLLM decides for a sliding window must not be decided for recency pages: their first pages stay.

vLLM 0.33's model runner V2 sets what is below a window to null, in every group whose spec is a SlidingWindowSpec.
"""

import dataclasses
import pickle

import pytest
import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec, get_kv_cache_spec_sliding_window

from vllm_antkv.cache.specs import RecencySpec
from vllm_antkv.config import AntKVConfig

pytestmark = pytest.mark.serving

#: Members of SlidingWindowSpec and its bases that say which tokens or pages live, and how much memory that takes.
DECIDED_HERE = {
    "extra_retained_tokens",
    "is_uniform_with_collection",
    "max_admission_blocks_per_request",
    "num_retained_tokens",
    "sliding_window",
}
#: Members that say how a page or a block table is laid out, or follow from those above.
LEFT_TO_VLLM = {
    # Layout of a page.
    "block_size",
    "block_stride_alignment",
    "block_table_token_alignment",
    "copy_with_new_block_size",
    "dtype",
    "get_block_stride_alignment",
    "get_num_kernel_states",
    "has_layer_views",
    "head_size",
    "head_size_v",
    "kv_quant_mode",
    "num_head_slots",
    "num_heads",
    "num_kv_heads",
    "num_states",
    "page_size_bytes",
    "page_size_padded",
    "real_page_size_bytes",
    "state_content_bytes",
    "state_content_size_bytes",
    "tokens_per_state",
    "unpadded_page_size_bytes",
    # Length of a block table row: all pages of the longest sequence.
    "max_num_blocks_per_req",
    "uses_slot_mapping",
    # `max_admission_blocks_per_request` pages.
    "max_memory_usage_bytes",
    # Equal specs share a group.
    "merge",
    # Sharding by context parallelism, which is refused.
    "dcp_sharded",
    # Which tensor-parallel ranks hold the same, for KV connectors, which are refused.
    "max_tp_shards",
    # A draft model's layers: speculative decoding is refused.
    "is_draft",
    # True: hits are looked for by RecencyManager.
    "prefix_cacheable",
    # 0: nothing is computed again after a hit.
    "prefix_replay_tokens",
}


@pytest.fixture
def spec() -> RecencySpec:
    return RecencySpec(
        block_size=8,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.uint8,
        state_content_bytes=2048,
        tokens_per_state=8,
        settings=AntKVConfig(),
        max_len=4096,
        interval=512,
        max_steps=1,
    )


def members() -> set[str]:
    fields = {field.name for field in dataclasses.fields(SlidingWindowSpec)}
    return {name for name in dir(SlidingWindowSpec) if not name.startswith("_")} | fields


def test_somebody_decided_on_every_member_of_the_parent() -> None:
    """A name that is new in this vLLM: does it say which pages live? Then override it in RecencySpec."""
    assert members() <= DECIDED_HERE | LEFT_TO_VLLM


@pytest.mark.parametrize("name", sorted(DECIDED_HERE - {"extra_retained_tokens"}))
def test_recency_pages_decide_for_themselves(name: str) -> None:
    assert name in vars(RecencySpec) or name in RecencySpec.__annotations__


def test_no_page_is_below_a_window(spec: RecencySpec) -> None:
    assert spec.num_retained_tokens == 0
    assert get_kv_cache_spec_sliding_window(spec) == spec.max_len
    assert spec.retention.pages_at(spec.max_len)[0] == 0


def test_vllm_cannot_retain_more_than_was_decided(spec: RecencySpec) -> None:
    """vLLM replaces this field in every SlidingWindowSpec, by 0 where there is no speculative decoding."""
    assert dataclasses.replace(spec, extra_retained_tokens=0) == spec
    with pytest.raises(AssertionError, match="refused at start-up"):
        dataclasses.replace(spec, extra_retained_tokens=1)


def test_a_spec_is_the_same_in_another_process(spec: RecencySpec) -> None:
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
