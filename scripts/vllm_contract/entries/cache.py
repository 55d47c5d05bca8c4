"""What `vllm_antkv.cache` derives from, and how vLLM divides and hands out the pool."""

from scripts.vllm_contract.reliance import How, Reliance

_SPECS = "vllm.v1.kv_cache_interface"
_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_UTILS = "vllm.v1.core.kv_cache_utils"
#: 0.33 moved the division of memory out of kv_cache_utils.
_PLANNING = f"vllm.v1.core.kv_cache_planning|{_UTILS}"
_V2_TABLES = "vllm.v1.worker.gpu.block_table"


def _override(method: str, parameters: str, why: str) -> Reliance:
    return Reliance(f"{_MANAGER}.{method}", How.OVERRIDE, parameters, why)


_PAGES = (
    Reliance(f"{_SPECS}:KVCacheSpec", How.SUBCLASS, "", "specs: the root of all specs"),
    Reliance(f"{_SPECS}:SlidingWindowSpec", How.SUBCLASS, "", "specs: RecencySpec derives from it"),
    Reliance(
        f"{_SPECS}:SlidingWindowSpec.max_admission_blocks_per_request",
        How.OVERRIDE,
        "self, max_in_flight_tokens, max_model_len",
        "specs: by which requests are admitted and the pool is sized",
    ),
    Reliance(
        f"{_SPECS}:SlidingWindowSpec.is_uniform_with_collection",
        How.OVERRIDE,
        "self, kv_cache_specs",
        "specs: recency pages never share a block table with others",
    ),
    Reliance(
        f"{_SPECS}:SlidingWindowSpec.num_retained_tokens",
        How.OVERRIDE,
        "self",
        "specs: 0, or runner V2 makes pages below the window null, the intact prefix among them",
        since="0.33",
    ),
    Reliance(
        f"{_SPECS}:SlidingWindowSpec",
        How.FIELDS,
        "__post_init__ block_size num_kv_heads head_size dtype state_content_bytes tokens_per_state sliding_window "
        "dcp_sharded extra_retained_tokens",
        "specs: what a recency page is",
    ),
    Reliance(f"{_SPECS}:FullAttentionSpec", How.SUBCLASS, "", "specs: VQ pages are one"),
    Reliance(
        f"{_SPECS}:FullAttentionSpec",
        How.FIELDS,
        "block_size num_kv_heads head_size dtype page_size_bytes state_content_bytes tokens_per_state",
        "specs: what a VQ page is",
    ),
    Reliance(f"{_SPECS}:MambaSpec", How.NAME, "", "scripts: the page of a state"),
    Reliance(f"{_SPECS}:KVCacheSpec", How.FIELDS, "block_size page_size_bytes", "managers: tokens and bytes of a page"),
    Reliance(
        f"{_SPECS}:get_kv_cache_spec_sliding_window",
        How.CALL,
        "kv_cache_spec",
        "specs: the window that metadata builders are told; the longest sequence",
    ),
    Reliance(f"{_SPECS}:KVCacheConfig", How.NAME, "", "scripts: how memory was divided"),
    Reliance(f"{_SPECS}:KVCacheConfig", How.FIELDS, "kv_cache_groups", "requests: whose block table is whose"),
    Reliance(f"{_SPECS}:KVCacheGroupSpec", How.FIELDS, "layer_names", "requests: layers that share a block table"),
)

_MANAGERS = (
    Reliance(_MANAGER, How.SUBCLASS, "", "managers: RecencyManager derives from it"),
    Reliance(
        f"{_MANAGER}.__init__",
        How.BEHAVIOUR,
        "",
        "managers: ours takes the spec and passes on the rest by keyword",
    ),
    _override(
        "get_num_blocks_to_allocate",
        "self, request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_local_computed_tokens, "
        "num_tokens_main_model, apply_admission_cap=, prefill_end=",
        "managers: counts what allocate_new_blocks takes in the same step",
    ),
    _override(
        "add_local_computed_blocks",
        "self, request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens",
        "managers: adopts a prefix hit",
    ),
    _override("allocate_new_blocks", "self, request_id, num_tokens, num_tokens_main_model", "managers: null or real"),
    _override(
        "remove_skipped_blocks",
        "self, request_id, processed_computed_tokens, num_prompt_tokens=",
        "managers: frees what no later step reads",
    ),
    _override("pop_blocks_for_free", "self, request_id", "managers: forgets a request"),
    _override(
        "find_longest_cache_hit",
        "cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, "
        "alignment_tokens, dcp_world_size=, pcp_world_size=",
        "managers: a hit ends where all pages that are still read are cached",
    ),
    _override(
        "reachable_block_mask",
        "cls, start_block, end_block, alignment_tokens, kv_cache_spec, use_eagle, retention_interval=, "
        "reachable_boundaries=, dcp_world_size=, final_segment_end_block=",
        "managers: which full pages enter the prefix cache",
    ),
    _override("get_num_skipped_tokens", "self, num_computed_tokens", "managers: none; dead pages are no head"),
    Reliance(f"{_MANAGER}._get_num_evictable_blocks", How.CALL, "blocks", "managers: hit pages that nobody else holds"),
    Reliance(
        _MANAGER,
        How.FIELDS,
        "_null_block block_pool block_size enable_caching kv_cache_group_id max_admission_blocks_per_request "
        "num_cached_block req_to_blocks",
        "managers, requests: state of a manager",
    ),
    Reliance(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        How.BEHAVIOUR,
        "",
        "managers: the order of count, free, adopt and allocate in a step",
    ),
    Reliance(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        How.BEHAVIOUR,
        "",
        "managers: how prefix hits of both groups are brought together",
    ),
    Reliance(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        How.FIELDS,
        "block_pool coordinator free kv_cache_config",
        "managers, requests, status: where the pool and the managers are",
    ),
    Reliance(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        How.FIELDS,
        "single_type_managers",
        "managers, requests: one per group of pages",
    ),
    Reliance(
        "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit",
        How.BEHAVIOUR,
        "",
        "managers: asks both groups until they agree on a length",
    ),
)

_MANAGER_OF_WINDOWS = "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager"
_WINDOWS = (
    Reliance(
        f"{_MANAGER_OF_WINDOWS}.get_num_skipped_tokens",
        How.BEHAVIOUR,
        "",
        "specs: frees the VQ pages that no later query sees",
    ),
    Reliance(
        f"{_MANAGER_OF_WINDOWS}.find_longest_cache_hit",
        How.BEHAVIOUR,
        "",
        "specs: a hit needs the VQ pages of the window before it",
    ),
    Reliance(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
        How.NAME,
        "",
        "requests: which pages hold all tokens",
    ),
)

_BLOCKS = (
    Reliance(f"{_POOL}.free_blocks", How.CALL, "ordered_blocks", "managers: dead pages; the tail is evicted first"),
    Reliance(f"{_POOL}.get_cached_block", How.CALL, "block_hash, kv_cache_group_ids", "managers, requests: by hash"),
    Reliance(f"{_POOL}.get_new_blocks", How.CALL, "num_blocks", "managers: real pages"),
    Reliance(f"{_POOL}.get_num_free_blocks", How.CALL, "-", "managers: pages for hits only while room is to spare"),
    Reliance(f"{_POOL}.touch", How.CALL, "blocks", "managers: a page that is held again"),
    Reliance(_POOL, How.FIELDS, "hash_block_size null_block num_gpu_blocks", "managers, requests, status: of the pool"),
    Reliance(
        f"{_POOL}.cache_full_blocks", How.BEHAVIOUR, "", "managers: null pages among the full ones are not published"
    ),
    Reliance(f"{_UTILS}:KVCacheBlock", How.FIELDS, "block_id is_null", "managers, requests: a page"),
    Reliance(f"{_UTILS}:BlockHashList", How.NAME, "", "managers: in a signature"),
    Reliance(
        f"{_UTILS}:resolve_block_hashes",
        How.CALL,
        "block_hashes, hash_block_size, block_size",
        "managers, requests: hashes of blocks of another size",
    ),
    Reliance(
        "vllm.v1.request:Request",
        How.FIELDS,
        "all_token_ids block_hashes num_computed_tokens prompt_embeds prompt_token_ids request_id",
        "requests, status: of a request",
    ),
    Reliance(
        "vllm.v1.core.sched.scheduler:Scheduler",
        How.FIELDS,
        "kv_cache_manager requests schedule update_from_output add_request",
        "requests, status: of the scheduler",
    ),
)

_PLANS = (
    Reliance(f"{_UTILS}:get_kv_cache_capacity", How.CALL, "vllm_config, kv_cache_config", "scripts: tokens in a pool"),
    Reliance(
        f"{_PLANNING}:get_kv_cache_groups", How.CALL, "vllm_config, kv_cache_spec", "scripts: which pages share tables"
    ),
    Reliance(
        f"{_PLANNING}:get_kv_cache_config_from_groups",
        How.CALL,
        "vllm_config, kv_cache_groups, available_memory",
        "scripts: divides memory",
    ),
    Reliance(
        f"{_PLANNING}:_get_packed_kv_cache_groups",
        How.BEHAVIOUR,
        "",
        "specs, pages: pages of two sizes become two groups of one pool; patterns of sizes stay whole",
    ),
    Reliance(
        "vllm.v1.attention.backends.utils:record_kv_cache_layout",
        How.CALL,
        "cache_config, layout_name",
        "scripts: what the engine asks the backend",
    ),
)

_V2 = (
    Reliance(f"{_V2_TABLES}:BlockTables.gather_block_tables", How.BEHAVIOUR, "", "specs: runner V2 shows live pages"),
    Reliance(f"{_V2_TABLES}:_gather_block_tables_kernel", How.BEHAVIOUR, "", "specs: and makes none of them null"),
    Reliance(
        f"{_V2_TABLES}:_compute_slot_mappings_kernel", How.BEHAVIOUR, "", "specs: slots of null pages lie in block 0"
    ),
    Reliance(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
        How.BEHAVIOUR,
        "",
        "specs: what runner V2 reads of a spec",
    ),
    Reliance("vllm.v1.worker.block_table:BlockTable", How.BEHAVIOUR, "", "specs: runner V1's tables"),
)

ENTRIES = (*_PAGES, *_MANAGERS, *_WINDOWS, *_BLOCKS, *_PLANS, *_V2)
