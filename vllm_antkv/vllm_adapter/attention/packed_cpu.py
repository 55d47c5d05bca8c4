"""vLLM's own attention on CPUs, for layers whose pages lie beside pages of ours in a block. Imported on CPUs only."""

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout


class PackedCPUBackend(CPUAttentionBackend):
    """Its kernels go from block to block by the stride of the pages, whatever lies between."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Block outermost, as pages of ours need it; a page is what it is in vLLM's own."""
        return (KVCacheLayout.BLHNC,)
