"""The members of vLLM's classes that ours inherit from where pages are allocated, and what we decided about each.

A member that is new may decide which pages live, as `SlidingWindowSpec.num_retained_tokens` of 0.33 does: model runner
V2 sets to null what is below it, the intact prefix too. So the plugin stays inactive until somebody has looked at it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Members:
    """Of one class of vLLM that one of ours derives from.

    decided: what says which pages live, for how long, or how many are taken; ours overrides all of them.
    inherited: everything else.
    """

    decided: frozenset[str]
    inherited: frozenset[str]

    def unknown(self, parent: type) -> list[str]:
        """Members of the parent that nobody decided about."""
        public = {name for name in dir(parent) if not (name.startswith("__") and name.endswith("__"))}
        names = public | set(getattr(parent, "__dataclass_fields__", ()))
        # What every class with abstract methods, or every dataclass, has.
        return sorted(name for name in names - self.decided - self.inherited if not name.startswith("_abc_"))


#: SlidingWindowSpec, the parent of RecencySpec.
SPEC = Members(
    decided=frozenset(
        {
            "extra_retained_tokens",
            "is_uniform_with_collection",
            "max_admission_blocks_per_request",
            "num_retained_tokens",
            "sliding_window",
        }
    ),
    inherited=frozenset(
        {
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
            # Context parallelism is refused. What drafts has no recency pages.
            "dcp_sharded",
            "is_draft",
            "max_tp_shards",
            # True: RecencyManager looks for hits.
            "prefix_cacheable",
            # 0: nothing is computed again after a hit.
            "prefix_replay_tokens",
        }
    ),
)

#: SingleTypeKVCacheManager, the parent of RecencyManager.
MANAGER = Members(
    decided=frozenset(
        {
            "add_local_computed_blocks",
            "allocate_external_computed_blocks",
            "allocate_new_blocks",
            "find_longest_cache_hit",
            "get_num_blocks_to_allocate",
            "get_num_skipped_tokens",
            "pop_blocks_for_free",
            "reachable_block_mask",
            "remove_skipped_blocks",
        }
    ),
    inherited=frozenset(
        {
            # `reachable_block_mask` says which blocks it publishes.
            "cache_blocks",
            # All that `pop_blocks_for_free` returns.
            "free",
            # What a hit holds that nobody else does; counted, not decided.
            "_get_num_evictable_blocks",
            # Called by methods that are overridden.
            "_has_partial_local_hit",
            "_remove_blocks_in_range",
            # Hand-offs to KV connectors that are refused.
            "finalize_partial_tail_offload",
            "has_positionally_stable_blocks",
            "take_pending_boundary_state_offloads",
            # Hits inside a block, which are Mamba's.
            "_apply_cow",
            "retains_longer_hit",
            "supports_fine_grained_hash_lookup",
            "take_pending_cow_copies",
            # Blocks to zero: none, since the bytes are uint8.
            "new_step_starts",
            "records_new_block_ids",
            "take_new_block_ids",
        }
    ),
)
