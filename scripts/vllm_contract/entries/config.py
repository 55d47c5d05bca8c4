"""Fields of vLLM's configuration that are read, completed or refused."""

from scripts.vllm_contract.reliance import How, Reliance

ENTRIES = (
    Reliance(
        "vllm.config:VllmConfig",
        How.FIELDS,
        "additional_config attention_config cache_config compilation_config kv_transfer_config lora_config "
        "max_in_flight_tokens model_config parallel_config scheduler_config speculative_config",
        "all rooms: where everything is found; additional_config carries our settings to the workers",
    ),
    Reliance(
        "vllm.config.vllm:VllmConfig.compute_hash",
        How.BEHAVIOUR,
        "",
        "attention: additional_config is part of the key of compiled graphs",
    ),
    Reliance("vllm.config:set_current_vllm_config", How.NAME, "", "tests: layers are made under a configuration"),
    Reliance(
        "vllm.config.cache:CacheConfig",
        How.FIELDS,
        "block_size cache_dtype enable_prefix_caching kv_cache_dtype_skip_layers kv_cache_layout kv_offloading_size "
        "kv_sharing_fast_prefill num_gpu_blocks prefix_cache_retention_interval sliding_window "
        "user_specified_block_size",
        "startup, refusals, specs: what of the cache the user chose",
    ),
    Reliance(
        "vllm.config:ModelConfig",
        How.FIELDS,
        "architecture dtype get_head_size get_num_kv_heads get_num_layers get_total_num_hidden_layers "
        "get_total_num_kv_heads get_vocab_size hf_config hf_text_config is_attention_free is_encoder_decoder is_hybrid "
        "is_mm_prefix_lm max_model_len model mrope_num_dims revision runner_type served_model_name use_mla uses_alibi "
        "uses_mrope using_transformers_backend",
        "startup, refusals, footprint: which model it is",
    ),
    Reliance(
        "vllm.config:ParallelConfig",
        How.FIELDS,
        "_api_process_rank data_parallel_size pipeline_parallel_size tensor_parallel_size use_ubatching",
        "refusals, metrics: how the model and its API are divided",
    ),
    Reliance(
        "vllm.config:SchedulerConfig",
        How.FIELDS,
        "disable_hybrid_kv_cache_manager max_num_batched_tokens max_num_seqs",
        "refusals, specs: how steps are made",
    ),
    Reliance("vllm.config:AttentionConfig", How.FIELDS, "backend", "refusals: another backend was asked for"),
    Reliance(
        "vllm.config:CompilationConfig",
        How.FIELDS,
        "static_forward_context",
        "attention: where layers are found by name; ours and what they share are put beside",
    ),
    Reliance("vllm.config:CUDAGraphMode", How.FIELDS, "FULL NONE", "tests: what a step runs as"),
    Reliance(
        "vllm.engine.arg_utils:EngineArgs",
        How.FIELDS,
        "add_cli_args decode_context_parallel_size language_model_only prefill_context_parallel_size",
        "refusals: before vLLM asks for more GPUs; calibration, served evaluation: text alone",
    ),
)
