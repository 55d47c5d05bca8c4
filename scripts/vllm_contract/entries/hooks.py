"""What `vllm_antkv.hooks` wraps, adds to and asks."""

from scripts.vllm_contract.reliance import How, Reliance

_CACHE = "vllm.config.cache"
_KV = "vllm.v1.kv_cache_interface"
_WORKER = "vllm.v1.worker.worker_base"
_CORE = "vllm.v1.engine.core:EngineCore"
_GPU = "vllm.v1.worker.gpu_worker:Worker"
_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2 = "vllm.v1.worker.gpu.model_runner"

_DTYPE = (
    Reliance("vllm.config:cache", How.NAME, "", "dtype: the module whose names are extended"),
    Reliance(f"{_CACHE}:CacheDType", How.BEHAVIOUR, "", "dtype: a Literal of strings whose arguments can grow"),
    Reliance(
        f"{_CACHE}:CacheConfig._validate_cache_dtype",
        How.BEHAVIOUR,
        "",
        "dtype: refuses what is not registered, and says what is",
    ),
    Reliance(
        f"{_CACHE}:register_kv_cache_dtype",
        How.CALL,
        "name",
        "dtype: the registry, a decorator of a handler class",
        since="0.33",
    ),
    Reliance(
        f"{_CACHE}:KV_CACHE_DTYPES",
        How.BEHAVIOUR,
        "",
        "dtype: the values of --kv-cache-dtype, to which registering adds",
        since="0.33",
    ),
    Reliance(
        f"{_CACHE}:_KV_CACHE_DTYPE_HANDLERS",
        How.NAME,
        "",
        "dtype: handlers by name, from which ours go where the plugin stays inactive",
        since="0.33",
    ),
    Reliance("vllm.engine:arg_utils", How.NAME, "", "dtype: the module that makes the parser's arguments"),
    Reliance(
        "vllm.engine.arg_utils:_compute_kwargs",
        How.BEHAVIOUR,
        "",
        "dtype: caches a parser's arguments; emptied so that it sees the presets",
    ),
    Reliance("vllm.utils:torch_utils", How.NAME, "", "dtype: the module of the table of torch dtypes"),
    Reliance(
        "vllm.utils.torch_utils:STR_DTYPE_TO_TORCH_DTYPE",
        How.NAME,
        "",
        "dtype: a dict in which the presets become uint8, opaque bytes",
    ),
    Reliance(
        f"{_KV}:KVQuantMode", How.FIELDS, "NONE", "dtype: what the presets are to vLLM's own kernels: not quantised"
    ),
    Reliance(
        f"{_KV}:get_kv_quant_mode", How.CALL, "kv_cache_dtype", "dtype: answers NONE for names that it does not know"
    ),
)

_BACKEND = (
    Reliance("vllm.platforms:current_platform", How.NAME, "", "backend: the platform whose choice is wrapped"),
    Reliance(
        "vllm.platforms.interface:Platform.get_attn_backend_cls",
        How.WRAP,
        "cls, selected_backend, attn_selector_config, num_heads=",
        "backend: answers a class path; ours for the presets",
    ),
    Reliance(
        "vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides",
        How.WRAP,
        "cls",
        "tests: what the first engine of a process has done is not done again",
    ),
    Reliance("vllm.triton_utils.dispatcher:_registry", How.NAME, "", "tests: whether there was one"),
    Reliance(
        "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",
        How.WRAP,
        "cls, selected_backend, attn_selector_config, num_heads=",
        "backend: as above, on CPUs; what it refuses is passed by for the presets",
    ),
    Reliance(
        "vllm.platforms.cuda:CudaPlatformBase.get_attn_backend_cls",
        How.WRAP,
        "cls, selected_backend, attn_selector_config, num_heads=",
        "backend: as above, on GPUs",
    ),
    Reliance(
        "vllm.platforms.interface:Platform",
        How.FIELDS,
        "get_device_capability is_cpu is_cuda device_name",
        "backend, refusals: what kind of device this is",
    ),
    Reliance(
        "vllm.platforms.interface:DeviceCapability",
        How.FIELDS,
        "major minor",
        "backend: a NamedTuple; stands for no capability on CPUs",
    ),
    Reliance(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum",
        How.FIELDS,
        "register get_class",
        "backend: ours becomes a member",
    ),
    Reliance(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.register",
        How.CALL,
        "name, value",
        "backend: makes the member ANTKV",
    ),
    Reliance(
        "vllm.v1.attention.backend:AttentionBackend.validate_configuration",
        How.CALL,
        "device_capability=, head_size=, dtype=, kv_cache_dtype=, block_size=, use_mla=, has_sink=, use_sparse=, "
        "use_mm_prefix=, use_per_head_quant_scales=, attn_type=",
        "backend: asked with the fields of AttentionSelectorConfig, as vLLM does",
    ),
    Reliance(
        "vllm.v1.attention.selector:AttentionSelectorConfig",
        How.FIELDS,
        "head_size kv_cache_dtype",
        "backend: a NamedTuple whose fields are arguments of validate_configuration",
    ),
)

_SPECS = (
    Reliance(
        "vllm.v1.kv_cache_spec_registry:_REGISTRY_KVCACHESPEC_LIST",
        How.NAME,
        "",
        "specs: what is registered, from which ours goes where the plugin stays inactive",
    ),
    Reliance(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered",
        How.CALL,
        "-",
        "specs: registers the built-in specs, if nothing is registered yet",
    ),
    Reliance(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
        How.CALL,
        "kvcache_spec_cls, manager_class, uniform_type_base_spec=",
        "specs: RecencySpec gets RecencyManager",
    ),
    Reliance(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.get_manager_class",
        How.CALL,
        "kvcache_spec",
        "specs: who manages pages of a spec",
    ),
)

_WORKERS = (
    Reliance(
        "vllm.engine.arg_utils:EngineArgs", How.FIELDS, "kv_cache_dtype", "config: whether a preset was asked for"
    ),
    Reliance(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        How.WRAP,
        "self, usage_context=, headless=",
        "config: refusals and defaults, in the process that the user started",
    ),
    Reliance("vllm.config:ParallelConfig", How.FIELDS, "worker_cls", "config, refusals: the class of the workers"),
    Reliance(
        f"{_WORKER}:WorkerWrapperBase.__getattr__",
        How.BEHAVIOUR,
        "",
        "worker, status: calls of unknown methods go to the worker",
    ),
    Reliance(
        _GPU, How.FIELDS, "compilation_config device model_config model_runner vllm_config", "worker: of a worker"
    ),
    Reliance(
        "vllm.v1.core.sched.output:SchedulerOutput",
        How.FIELDS,
        "finished_req_ids make_empty scheduled_cached_reqs scheduled_new_reqs",
        "trained_prefix: requests that begin, and that ended",
    ),
    Reliance(
        "vllm.v1.core.sched.output:NewRequestData",
        How.FIELDS,
        "block_ids prompt_embeds prompt_token_ids req_id",
        "trained_prefix: their prompts and first pages",
    ),
    Reliance(
        "vllm.v1.core.sched.output:CachedRequestData",
        How.FIELDS,
        "new_block_ids req_ids resumed_req_ids",
        "trained_prefix: the same of requests that were preempted",
    ),
    Reliance("vllm.v1.worker.cpu_worker:CPUWorker", How.NAME, "", "worker: derives from the worker for GPUs"),
    Reliance(f"{_GPU}.load_model", How.OVERRIDE, "self, *, load_dummy_weights=", "worker: the model gets codebooks"),
    Reliance(f"{_GPU}.initialize_from_config", How.OVERRIDE, "self, kv_cache_config", "worker: pages by layer"),
    Reliance(f"{_GPU}.get_model", How.CALL, "-", "worker: the model whose layers get codebooks"),
    Reliance(
        f"{_V1}.execute_model",
        How.CALL,
        "scheduler_output, intermediate_tensors=",
        "worker: what is scheduled, runner V1",
    ),
    Reliance(
        f"{_V2}:GPUModelRunner.execute_model",
        How.CALL,
        "scheduler_output, intermediate_tensors=",
        "worker: the same, runner V2",
    ),
    Reliance(
        "vllm.v1.worker.utils:add_kv_sharing_layers_to_kv_cache_groups",
        How.BEHAVIOUR,
        "",
        "worker: a layer that reads the cache of another stands in its group, whose spec is asked for its page",
    ),
    Reliance(
        f"{_V1}.initialize_attn_backend",
        How.BEHAVIOUR,
        "",
        "worker: looks for pages by the layers' own names; its source tells whether the hook is needed",
    ),
    Reliance(
        "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs",
        How.FIELDS,
        "kv_cache_specs",
        "worker: pages of a group by the layers' names",
    ),
    Reliance(f"{_V1}", How.FIELDS, "mrope_positions", "positions: those of a step's tokens, in one buffer, runner V1"),
    Reliance(
        f"{_V1}._calc_mrope_positions",
        How.BEHAVIOUR,
        "",
        "positions: of a prompt by its content, behind it one more than the token before; before every step",
    ),
    Reliance("vllm.v1.utils:CpuGpuBuffer", How.FIELDS, "gpu", "positions: the buffer's memory on the device"),
    Reliance(f"{_V2}:GPUModelRunner", How.FIELDS, "model_state", "positions: where runner V2 has them"),
    Reliance(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState",
        How.FIELDS,
        "rope_state",
        "positions: where runner V2 has them",
    ),
    Reliance(
        "vllm.v1.worker.gpu.mm.rope:RopeState.prepare_positions",
        How.BEHAVIOUR,
        "",
        "positions: of a step's tokens, in one buffer, runner V2",
    ),
    Reliance("vllm.v1.worker.gpu.mm.rope:RopeState", How.FIELDS, "positions", "positions: the buffer, runner V2"),
)

_CORES = (
    Reliance(
        f"{_CORE}.preprocess_add_request",
        How.WRAP,
        "self, request",
        "prefix_salt: every request passes before its blocks are hashed",
    ),
    Reliance(
        f"{_CORE}.add_request", How.WRAP, "self, request, request_wave=", "status: the last requests are remembered"
    ),
    Reliance(
        f"{_CORE}.collective_rpc", How.CALL, "method, args=", "status: calls a method that was added to the workers"
    ),
    Reliance(_CORE, How.FIELDS, "scheduler vllm_config batch_queue", "status, prefix_salt: of an engine core"),
    Reliance(
        "vllm.v1.core.sched.interface:SchedulerInterface.has_requests",
        How.BEHAVIOUR,
        "",
        "status: an engine without requests does nothing",
    ),
    Reliance(
        "vllm.v1.engine:EngineCoreRequest",
        How.FIELDS,
        "cache_salt prompt_token_ids prompt_embeds",
        "prefix_salt: the salt is set where the prompt starts with the trained prefix",
    ),
    Reliance(
        "vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async",
        How.CALL,
        "method",
        "status: the API server asks every engine core",
    ),
    Reliance(
        "vllm.v1.metrics.stats:SchedulerStats",
        How.SUBCLASS,
        "",
        "status: superseded once statistics carry a plugin's (`extras`)",
    ),
    Reliance("vllm:plugins", How.NAME, "", "all: a new group of plugins may do what a hook does"),
    Reliance("vllm.plugins:DEFAULT_PLUGINS_GROUP", How.NAME, "", "all: the group that this plugin is in"),
    Reliance("vllm.plugins:IO_PROCESSOR_PLUGINS_GROUP", How.NAME, "", "all: known"),
    Reliance("vllm.plugins:PLATFORM_PLUGINS_GROUP", How.NAME, "", "all: known"),
    Reliance("vllm.plugins:STAT_LOGGER_PLUGINS_GROUP", How.NAME, "", "all: known"),
    Reliance("vllm.plugins:ENDPOINT_PLUGINS_GROUP", How.NAME, "", "server: the group of the routes"),
    Reliance(
        "vllm.plugins:load_endpoint_plugins",
        How.WRAP,
        "supported_tasks=",
        "metrics: answers the plugins of an API server; asked of the module when the server starts",
    ),
    Reliance("vllm:envs", How.FIELDS, "VLLM_PLUGINS", "metrics: whether the routes were asked for"),
    Reliance("vllm.envs:VLLM_PLUGINS", How.NAME, "", "metrics: as above"),
    Reliance("vllm.plugins:load_general_plugins", How.BEHAVIOUR, "", "all: called in every process of vLLM"),
)

ENTRIES = (*_DTYPE, *_BACKEND, *_SPECS, *_WORKERS, *_CORES)
