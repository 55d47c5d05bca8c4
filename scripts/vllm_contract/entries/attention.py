"""What `vllm_antkv.attention` derives from, and reads of a step."""

from scripts.vllm_contract.reliance import How, Reliance

_BACKEND = "vllm.v1.attention.backend"
_INTERFACES = "vllm.model_executor.models.interfaces"
_ROPE = "vllm.model_executor.layers.rotary_embedding"


def _override(method: str, parameters: str, why: str) -> Reliance:
    return Reliance(f"{_BACKEND}:{method}", How.OVERRIDE, parameters, why)


_BACKENDS = (
    Reliance(f"{_BACKEND}:AttentionBackend", How.SUBCLASS, "", "backend: two of them, one per class of pages"),
    _override("AttentionBackend.get_name", "-", "backend: ANTKV"),
    _override("AttentionBackend.get_impl_cls", "-", "backend: what a layer runs"),
    _override("AttentionBackend.get_builder_cls", "-", "backend: what plans a step"),
    _override("AttentionBackend.get_supported_kernel_block_sizes", "kv_cache_spec=", "backend: VQ pages are not split"),
    _override("AttentionBackend.get_preferred_block_size", "cls, default_block_size", "backend: the VQ block"),
    _override("AttentionBackend.get_supported_head_sizes", "cls", "backend: the tested ones"),
    _override("AttentionBackend.supported_kv_cache_layouts", "cls", "backend: block outermost"),
    _override("AttentionBackend.supports_kv_connector", "cls", "backend: never"),
    _override("AttentionBackend.supports_sink", "cls", "backend: learned logits are in every set of kernels"),
    _override("AttentionBackend.supports_sliding_window", "cls", "backend: pages past a window are freed"),
    Reliance(
        f"{_BACKEND}:AttentionBackend",
        How.FIELDS,
        "supported_dtypes supported_kv_cache_dtypes forward_includes_kv_cache_update",
        "backend: what it declares",
    ),
    Reliance(f"{_BACKEND}:MultipleOf", How.NAME, "", "backend: in a return type"),
    Reliance(
        "vllm.v1.kv_cache_layout:KVCacheLayout", How.FIELDS, "BLHNC", "backend: pages lie side by side in a block"
    ),
    Reliance(f"{_BACKEND}:AttentionImpl", How.SUBCLASS, "", "impl: AntKVImpl"),
    Reliance(
        f"{_BACKEND}:AttentionImpl.forward",
        How.OVERRIDE,
        "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, output_block_scale=",
        "impl: what a layer calls in each step",
    ),
    Reliance(
        f"{_BACKEND}:AttentionImpl.__init__",
        How.OVERRIDE,
        "self, num_heads, head_size, scale, num_kv_heads=, alibi_slopes=, sliding_window=, kv_cache_dtype=, "
        "logits_soft_cap=, attn_type=, kv_sharing_target_layer_name=",
        "impl: how a layer makes it",
    ),
    Reliance(f"{_BACKEND}:AttentionImpl", How.FIELDS, "head_size kv_cache_dtype num_heads scale", "impl: set by ours"),
    Reliance(f"{_BACKEND}:AttentionLayer", How.NAME, "", "impl: in a signature"),
    Reliance(f"{_BACKEND}:AttentionType", How.FIELDS, "DECODER", "impl: all other kinds are refused"),
)

_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"

#: Of layers that --kv-cache-dtype-skip-layers names.
_EXACT = (
    Reliance(f"{_CPU_ATTENTION}:CPUAttentionBackend", How.SUBCLASS, "", "packed_cpu: another layout of its pages"),
    Reliance(
        f"{_CPU_ATTENTION}:CPUAttentionBackend.supported_kv_cache_layouts",
        How.OVERRIDE,
        "cls",
        "packed_cpu: block outermost",
    ),
    Reliance(
        f"{_CPU_ATTENTION}:CPUAttentionBackendImpl.forward",
        How.BEHAVIOUR,
        "",
        "packed_cpu: pages are views whose blocks lie apart, and kernels go by their strides",
    ),
    Reliance(
        "vllm.model_executor.layers.attention:Attention.__init__",
        How.BEHAVIOUR,
        "",
        "exact_layers: a layer that is named by its index gets the backend of auto, sliding_window means all with one",
    ),
)

_METADATA = (
    Reliance(f"{_BACKEND}:AttentionMetadata", How.SUBCLASS, "", "metadata: one class per class of pages"),
    Reliance(f"{_BACKEND}:AttentionMetadataBuilder", How.SUBCLASS, "", "metadata: likewise"),
    _override(
        "AttentionMetadataBuilder.__init__",
        "self, kv_cache_spec, layer_names, vllm_config, device",
        "metadata: made so",
    ),
    _override(
        "AttentionMetadataBuilder.build",
        "self, common_prefix_len, common_attn_metadata, fast_build=",
        "metadata: once per step and group of layers",
    ),
    _override(
        "AttentionMetadataBuilder.build_for_cudagraph_capture",
        "self, common_attn_metadata",
        "metadata: for a step that is captured, not counted",
    ),
    _override(
        "AttentionMetadataBuilder.get_cudagraph_support",
        "cls, vllm_config, kv_cache_spec",
        "metadata: steps of one token per request on GPUs",
    ),
    Reliance(
        f"{_BACKEND}:AttentionCGSupport", How.FIELDS, "NEVER UNIFORM_SINGLE_TOKEN_DECODE", "metadata: what is answered"
    ),
    Reliance(
        f"{_BACKEND}:CommonAttentionMetadata",
        How.FIELDS,
        "block_table_tensor is_prefilling max_query_len max_seq_len num_actual_tokens num_reqs query_start_loc "
        "query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound slot_mapping",
        "metadata: everything that is known of a step",
    ),
    Reliance("vllm.forward_context:get_forward_context", How.CALL, "-", "impl, sinks: of the step that runs"),
    Reliance(
        "vllm.forward_context:ForwardContext",
        How.FIELDS,
        "attn_metadata no_compile_layers",
        "impl, sinks: metadata by layer name; what was put into static_forward_context",
    ),
    Reliance("vllm.v1.worker.workspace:current_workspace_manager", How.CALL, "-", "worker: vLLM's scratch memory"),
    Reliance(
        "vllm.v1.worker.workspace:WorkspaceManager.get_simultaneous",
        How.CALL,
        "shapes_and_dtypes",
        "worker: several tensors at once, that do not grow once graphs are captured",
    ),
)

_LAYERS = (
    Reliance(
        "vllm.model_executor.models.registry:ModelRegistry",
        How.NAME,
        "",
        "scripts: the class of a model, which knows the shape of its states",
    ),
    Reliance(
        "vllm.model_executor.layers.attention:Attention",
        How.FIELDS,
        "attn_backend head_size impl kv_cache kv_cache_torch_dtype kv_sharing_target_layer_name layer_name num_heads "
        "num_kv_heads sliding_window",
        "attach: of every attention layer",
    ),
    Reliance(
        "vllm.model_executor.layers.attention:Attention.get_kv_cache_spec",
        How.WRAP,
        "self, vllm_config",
        "attach: replaced on each layer, which alone knows its page's bytes",
    ),
    Reliance(
        "vllm.model_executor.layers.attention:Attention.forward",
        How.BEHAVIOUR,
        "",
        "impl, rows: query, key and value come as the impl expects, in this order, and unquantised",
    ),
    Reliance(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        How.SUBCLASS,
        "",
        "layer, positions: the recency companion of a layer, and that of all layers which has their positions",
    ),
    Reliance(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.bind_kv_cache",
        How.OVERRIDE,
        "self, kv_cache",
        "layer: where the pages come from",
    ),
    Reliance(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_attn_backend",
        How.OVERRIDE,
        "self",
        "layer: RecencyBackend",
    ),
    Reliance(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_kv_cache_spec",
        How.OVERRIDE,
        "self, vllm_config",
        "layer: RecencySpec",
    ),
    Reliance(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        How.FIELDS,
        "kv_cache",
        "layer: the pages, set by ours",
    ),
    Reliance(
        "vllm.v1.attention.backends.fa_utils:get_flash_attn_version",
        How.CALL,
        "head_size=",
        "flash_attention: 2 or 3, or None where there is none",
    ),
    Reliance(
        "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",
        How.CALL,
        "q=, k=, v=, out=, cu_seqlens_q=, max_seqlen_q=, seqused_k=, max_seqlen_k=, softmax_scale=, causal=, "
        "window_size=, block_table=, return_softmax_lse=, num_splits=, fa_version=",
        "flash_attention: runs of queries, pages of keys, masks from the last key on, log-sum-exp (heads, rows)",
    ),
    Reliance(
        "vllm.model_executor.models.utils:extract_layer_index",
        How.CALL,
        "layer_name",
        "attach: which of the codebook's layers it is",
    ),
    Reliance(
        "vllm.distributed:get_tensor_model_parallel_rank", How.CALL, "-", "attach: which KV heads this process has"
    ),
    Reliance("vllm.distributed:get_tensor_model_parallel_world_size", How.CALL, "-", "attach: of how many"),
    Reliance(
        "vllm.utils.torch_utils:direct_register_custom_op",
        How.CALL,
        "op_name=, op_func=, mutates_args=, fake_impl=",
        "sinks: an op that torch.compile neither drops nor moves",
    ),
)

_ROTARY = (
    Reliance(
        f"{_INTERFACES}:supports_multimodal", How.CALL, "model", "rope: whether the text model is a part of the model"
    ),
    Reliance(
        f"{_INTERFACES}:supports_mrope",
        How.CALL,
        "model",
        "positions: whether vLLM has three positions for a model's tokens",
    ),
    Reliance(f"{_INTERFACES}:SupportsMRoPE", How.NAME, "", "tests: models that say three positions of their tokens"),
    *(
        Reliance(f"vllm.model_executor.models.{module}:{name}", How.NAME, "", "tests: as above")
        for module, name in (("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM"))
    ),
    Reliance(f"{_INTERFACES}:SupportsMultiModal", How.FIELDS, "get_language_model", "rope: the text model"),
    Reliance(f"{_ROPE}:get_rope", How.NAME, "", "tests: makes the rotary modules whose tables are read"),
    Reliance(
        f"{_ROPE}.base:RotaryEmbeddingBase._compute_cos_sin_cache", How.CALL, "-", "rope: cosines and sines in float32"
    ),
    Reliance(
        f"{_ROPE}.base:RotaryEmbedding.forward_native", How.CALL, "positions, query, key", "tests: what M-RoPE turns"
    ),
    Reliance(f"{_ROPE}.base:RotaryEmbeddingBase", How.FIELDS, "is_neox_style rotary_dim", "rope: which channels pair"),
    Reliance(
        f"{_ROPE}.mrope:MRotaryEmbedding",
        How.FIELDS,
        "cos_sin_cache head_size",
        "rope: a row as it takes them, in the dtype and on the device of its table",
    ),
    Reliance(
        f"{_ROPE}.mrope:MRotaryEmbedding.forward_native",
        How.CALL,
        "positions, query, key",
        "rope: by which of three positions a pair of channels turns is seen in what it does",
    ),
    Reliance(
        f"{_ROPE}.phi3_long_rope_scaled_rope:Phi3LongRoPEScaledRotaryEmbedding._compute_cos_sin_cache",
        How.CALL,
        "max_position_embeddings, rescale_factors, mscale",
        "rope: one of LongRoPE's two tables, in float32",
    ),
    Reliance(
        f"{_ROPE}.phi3_long_rope_scaled_rope:Phi3LongRoPEScaledRotaryEmbedding",
        How.FIELDS,
        "long_factor long_mscale max_position_embeddings original_max_position_embeddings short_factor short_mscale "
        "use_long_rope",
        "rope: which of the two, for all lengths",
    ),
    Reliance(
        f"{_ROPE}.phi3_long_rope_scaled_rope:Phi3LongRoPEScaledRotaryEmbedding.forward",
        How.BEHAVIOUR,
        "",
        "rope: the table does not change with the length of a request",
    ),
    Reliance(
        "vllm.forward_context:set_forward_context",
        How.CALL,
        "attn_metadata, vllm_config, num_tokens=, skip_compiled=",
        "probe: a run before there is a cache, and without compiling",
    ),
    Reliance(
        "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
        How.BEHAVIOUR,
        "",
        "probe: calls the impl's forward with `output` by its name",
    ),
)

ENTRIES = (*_BACKENDS, *_EXACT, *_METADATA, *_LAYERS, *_ROTARY)
