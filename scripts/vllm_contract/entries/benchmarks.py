"""What the benchmarks compare with: TurboQuant, FlashAttention and attention on CPUs as vLLM has them."""

from scripts.vllm_contract.reliance import How, Reliance

_TURBO = "vllm.model_executor.layers.quantization.turboquant"
_OPS = "vllm.v1.attention.ops"

ENTRIES = (
    Reliance(f"{_TURBO}.centroids:get_centroids", How.NAME, "", "turboquant: its centroids"),
    Reliance(f"{_TURBO}.config:TurboQuantConfig", How.FIELDS, "from_cache_dtype", "turboquant: its presets"),
    Reliance(f"{_OPS}.triton_turboquant_decode:triton_turboquant_decode_attention", How.NAME, "", "turboquant: timed"),
    Reliance(f"{_OPS}.triton_turboquant_store:triton_turboquant_store", How.NAME, "", "turboquant: timed"),
    Reliance("vllm.vllm_flash_attn:flash_attn_varlen_func", How.NAME, "", "flash attention: timed"),
    Reliance("vllm.vllm_flash_attn:get_scheduler_metadata", How.NAME, "", "flash attention: planned before"),
    Reliance("vllm.vllm_flash_attn:fa_version_unsupported_reason", How.NAME, "", "flash attention: why not"),
    Reliance("vllm.vllm_flash_attn:is_fa_version_supported", How.NAME, "", "flash attention: which version"),
    Reliance("vllm:_custom_ops", How.NAME, "", "attention on CPUs: timed"),
    Reliance("vllm._custom_ops:cpu_attn_get_scheduler_metadata", How.NAME, "", "attention on CPUs: planned before"),
    Reliance("vllm._custom_ops:cpu_attn_reshape_and_cache", How.NAME, "", "attention on CPUs: its cache"),
    Reliance("vllm._custom_ops:cpu_attention_with_kv_cache", How.NAME, "", "attention on CPUs: timed"),
    Reliance("vllm.utils:gpu_sync_debug", How.NAME, "", "GPU tests: as below"),
    Reliance("vllm.utils.gpu_sync_debug:_sync_check_enabled", How.NAME, "", "GPU tests: no step waits for the device"),
)
