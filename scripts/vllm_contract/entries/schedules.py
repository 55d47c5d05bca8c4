"""What `tests/contract` drives vLLM's scheduler and model runner V2's block tables with."""

from scripts.vllm_contract.reliance import How, Reliance

_UTILS = "vllm.v1.core.kv_cache_utils"
_V2 = "vllm.v1.worker.gpu"

ENTRIES = (
    Reliance("vllm.v1.core:kv_cache_utils", How.NAME, "", "schedules: the module of what follows"),
    Reliance(f"{_UTILS}:generate_scheduler_kv_cache_config", How.CALL, "kv_cache_configs", "schedules: a pool"),
    Reliance(f"{_UTILS}:resolve_kv_cache_block_sizes", How.CALL, "kv_cache_config, vllm_config", "schedules: likewise"),
    Reliance(
        f"{_UTILS}:resolve_cache_hit_alignment_tokens",
        How.CALL,
        "kv_cache_config, vllm_config, scheduler_block_size, hash_block_size",
        "schedules: likewise",
    ),
    Reliance(f"{_UTILS}:init_none_hash", How.CALL, "hash_fn", "schedules: hashes of blocks"),
    Reliance(f"{_UTILS}:get_request_block_hasher", How.CALL, "block_size, hash_function", "schedules: likewise"),
    Reliance("vllm.utils.hashing:get_hash_fn_by_name", How.CALL, "hash_fn_name", "schedules: likewise"),
    Reliance(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        How.FIELDS,
        "cache_hit_alignment_tokens hash_block_size kv_cache_groups kv_cache_tensors num_blocks",
        "schedules, block tables: a pool",
    ),
    Reliance(
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
        How.FIELDS,
        "kv_cache_spec layer_names",
        "schedules, block tables: a group of pages",
    ),
    Reliance("vllm.v1.core.sched.async_scheduler:AsyncScheduler", How.NAME, "", "schedules: a step ahead"),
    Reliance("vllm.v1.outputs:ModelRunnerOutput", How.NAME, "", "schedules: what a model would answer"),
    Reliance("vllm.v1.structured_output:StructuredOutputManager", How.NAME, "", "schedules: an argument"),
    Reliance(f"{_V2}:buffer_utils", How.FIELDS, "is_uva_available", "block tables: without pinned memory"),
    Reliance(f"{_V2}.buffer_utils:is_uva_available", How.NAME, "", "block tables: as above"),
    Reliance(f"{_V2}:model_runner", How.NAME, "", "block tables: the module of the runner"),
)
