"""What the hooks wrap, override and call of vLLM, and the parameters it had when they were written.

By hook, and by class ("module:Class") or module: function -> parameters without annotations, the same in every
supported release; or release -> parameters where not all of them have the function. "nixl" is of `kv_transfer.nixl`,
and "exact" of the worker: tests alone ask for it, since its module takes long to import.
"""

from collections.abc import Mapping

Parameters = str | Mapping[str, str]

RECORDED: dict[str, dict[str, dict[str, Parameters]]] = {
    "dtype": {
        "vllm.config.cache": {
            "register_kv_cache_dtype": {"0.33": "(name)"},
        },
        "vllm.v1.kv_cache_interface": {
            "get_kv_quant_mode": "(kv_cache_dtype)",
        },
        "vllm.engine.arg_utils": {
            "_compute_kwargs": {"0.32": "(cls)"},
        },
    },
    "backend": {
        "vllm.v1.attention.backends.registry:AttentionBackendEnum": {
            "register": "(name, value)",
            "get_class": "(self)",
        },
        "vllm.platforms:current_platform": {
            "get_attn_backend_cls": "(selected_backend, attn_selector_config, num_heads=None)",
            "get_device_capability": "(device_id=0)",
        },
        "vllm.v1.attention.backend:AttentionBackend": {
            "validate_configuration": (
                "(head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, "
                "use_mm_prefix, use_per_head_quant_scales, device_capability, attn_type, "
                "has_sliding_window=False, use_non_causal=False, use_batch_invariant=False, "
                "use_kv_connector=False, use_pcp=False, use_adaptive_verification=False, use_dcp=False, "
                "use_rswa=False)"
            ),
            "get_supported_kernel_block_sizes": "(kv_cache_spec=None)",
            "get_preferred_block_size": "(default_block_size)",
            "get_supported_head_sizes": "()",
            "supported_kv_cache_layouts": "()",
            "supports_kv_connector": "()",
        },
        "vllm.v1.attention.backend:AttentionImpl": {
            "__init__": (
                "(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, "
                "sliding_window=None, kv_cache_dtype='auto', logits_soft_cap=None, "
                "attn_type=<AttentionType.DECODER: 'decoder'>, kv_sharing_target_layer_name=None)"
            ),
            "forward": (
                "(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, "
                "output_block_scale=None)"
            ),
        },
        "vllm.v1.attention.backend:AttentionMetadataBuilder": {
            "__init__": "(self, kv_cache_spec, layer_names, vllm_config, device)",
            "build": "(self, common_prefix_len, common_attn_metadata, fast_build=False)",
            "get_cudagraph_support": "(vllm_config, kv_cache_spec)",
            "build_for_cudagraph_capture": "(self, common_attn_metadata)",
        },
    },
    "specs": {
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": {
            "_ensure_registered": "(vllm_config=None)",
            "register": "(kvcache_spec_cls, manager_class=None, uniform_type_base_spec=None)",
            "get_manager_class": "(kvcache_spec, role=None)",
        },
        "vllm.v1.kv_cache_interface:SlidingWindowSpec": {
            "__post_init__": "(self)",
            "max_admission_blocks_per_request": "(self, max_in_flight_tokens, max_model_len)",
            "is_uniform_with_collection": "(self, kv_cache_specs)",
        },
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": {
            "__init__": (
                "(self, kv_cache_spec, block_pool, enable_caching, kv_cache_group_id, scheduler_block_size, "
                "dcp_world_size=1, pcp_world_size=1, needs_kv_cache_zeroing=False, "
                "max_admission_blocks_per_request=None)"
            ),
            "get_num_blocks_to_allocate": (
                "(self, request_id, num_tokens, new_computed_blocks, total_computed_tokens, "
                "num_local_computed_tokens, num_tokens_main_model, apply_admission_cap=False, "
                "prefill_end=0)"
            ),
            "add_local_computed_blocks": (
                "(self, request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens)"
            ),
            "allocate_external_computed_blocks": (
                "(self, request_id, num_local_computed_tokens, num_external_computed_tokens, record_for_zeroing=True)"
            ),
            "allocate_new_blocks": "(self, request_id, num_tokens, num_tokens_main_model)",
            "remove_skipped_blocks": "(self, request_id, processed_computed_tokens, num_prompt_tokens=None)",
            "pop_blocks_for_free": "(self, request_id)",
            "find_longest_cache_hit": (
                "(block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, "
                "alignment_tokens, dcp_world_size=1, pcp_world_size=1)"
            ),
            "reachable_block_mask": (
                "(start_block, end_block, alignment_tokens, kv_cache_spec, use_eagle, "
                "retention_interval=None, reachable_boundaries=(), dcp_world_size=1, "
                "final_segment_end_block=None)"
            ),
            "get_num_skipped_tokens": "(self, num_computed_tokens)",
            "_get_num_evictable_blocks": "(blocks)",
        },
        "vllm.v1.core.block_pool:BlockPool": {
            "get_cached_block": "(self, block_hash, kv_cache_group_ids)",
            "get_new_blocks": "(self, num_blocks)",
            "touch": "(self, blocks)",
            "free_blocks": "(self, ordered_blocks)",
            "get_num_free_blocks": "(self)",
        },
        "vllm.v1.core.kv_cache_utils": {
            "resolve_block_hashes": (
                "(block_hashes, hash_block_size, block_size, *, supports_fine_grained_hash_lookup=False, "
                "alignment_tokens=None)"
            ),
        },
    },
    "groups": {
        "vllm.v1.core.kv_cache_utils": {
            "_get_packed_kv_cache_groups": {"0.32": "(vllm_config, kv_cache_spec)"},
        },
        "vllm.v1.core.kv_cache_planning": {
            "_get_packed_kv_cache_groups": {"0.33": "(vllm_config, kv_cache_spec)"},
        },
    },
    "config": {
        "vllm.engine.arg_utils:EngineArgs": {
            "create_engine_config": "(self, usage_context=None, headless=False)",
        },
        "vllm.v1.worker.worker_base:WorkerWrapperBase": {
            "initialize_from_config": "(self, kv_cache_configs)",
            "__getattr__": "(self, attr)",
        },
        "vllm.v1.worker.worker_base:WorkerBase": {
            "load_model": "(self, *, load_dummy_weights=False)",
            "get_model": "(self)",
        },
        "vllm.distributed.utils": {
            "get_pp_indices": "(num_hidden_layers, pp_rank, pp_size)",
        },
        "vllm.v1.worker.utils": {
            "add_kv_sharing_layers_to_kv_cache_groups": (
                "(shared_kv_cache_layers, kv_cache_groups, runner_only_attn_layers=None)"
            ),
        },
    },
    "connector": {
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": {
            "register_connector": "(name, module_path, class_name)",
        },
    },
    "nixl": {
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler:NixlPullConnectorScheduler": {
            "get_exchange_clipped_blocks": "(self, block_ids, clip_ssm=True)",
            "_prefill_backoff": "(self)",
            "_truncate_request_for_prefill": "(self, request)",
            "_get_remote_prefill_token_count": "(self, num_prompt_tokens)",
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker:NixlPullConnectorWorker": {
            "register_kv_caches": "(self, kv_caches)",
            "_apply_prefix_caching": (
                "(self, decode_block_ids, prefill_block_ids, decode_physical_per_logical, prefill_physical_per_logical)"
            ),
        },
        "vllm.v1.core.kv_cache_utils": {
            "resolve_kv_cache_block_sizes": "(kv_cache_config, vllm_config)",
        },
    },
    "exact": {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {
            "_zero_block_ids": "(self, block_ids)",
        },
    },
    "states": {
        "vllm.platforms.interface:Platform": {
            "_align_hybrid_block_size": "(vllm_config, backend_cls)",
        },
        "vllm.v1.core.sched.scheduler:Scheduler": {
            "_mamba_block_aligned_split": (
                "(self, request, num_new_tokens, num_new_local_computed_tokens=0, num_external_computed_tokens=0)"
            ),
        },
        "vllm.v1.kv_cache_interface": {
            "iter_layer_specs": "(kv_cache_spec)",
        },
        "vllm.v1.core.kv_cache_coordinator": {
            "partial_hash_hits_enabled": ("(kv_cache_groups, hash_block_size, dcp_world_size=1, manager_classes=None)"),
        },
    },
    "rope_cpu": {
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding": {
            "forward_cpu": "(self, positions, query, key=None)",
        },
    },
    "status": {
        "vllm.v1.engine.core:EngineCore": {
            "add_request": "(self, request, request_wave=0)",
            "collective_rpc": "(self, method, timeout=None, args=(), kwargs=None)",
        },
        "vllm.v1.engine.core_client:AsyncMPClient": {
            "call_utility_all_async": "(self, method, *args)",
        },
        "vllm.v1.core.kv_cache_manager:KVCacheManager": {
            "free": "(self, request)",
        },
    },
    "metrics": {
        "vllm.plugins": {
            "load_endpoint_plugins": "(supported_tasks=None)",
        },
    },
}
