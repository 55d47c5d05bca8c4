"""The answer of `GET /antkv/config`: every setting in effect, defaults included, and what follows from them."""

from typing import Any, Literal, Self

from pydantic import BaseModel, Field
from vllm.config import VllmConfig

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan


class Config(BaseModel, frozen=True):
    """The configuration of a server with an antkv cache."""

    active: Literal[True] = True
    model: str = Field(description="The name that clients use.")
    kv_cache_dtype: str
    settings: AntKVConfig
    block_size: int = Field(description="Tokens per VQ block.")
    anchor_rows: int = Field(
        description="Anchor slots of K, and as many of V, per VQ block and KV head; an unquantised anchor takes two."
    )
    codebook: str = Field(description="The file that is served.")
    engine: dict[str, Any] = Field(description="Options of vLLM that the cache depends on.")

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        """Read it from the configuration of a server with an antkv cache."""
        plan = engine_plan(vllm_config)
        cache, model = vllm_config.cache_config, vllm_config.model_config
        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        return cls(
            model=model.served_model_name,
            kv_cache_dtype=cache.cache_dtype,
            settings=plan.settings,
            block_size=VQ_BLOCK_SIZE,
            anchor_rows=plan.settings.anchor_rows,
            codebook=plan.codebook.path,
            engine={
                "dtype": str(model.dtype).removeprefix("torch."),
                "max_model_len": model.max_model_len,
                "max_num_seqs": scheduler.max_num_seqs,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "enable_prefix_caching": cache.enable_prefix_caching,
                "prefix_cache_retention_interval": cache.prefix_cache_retention_interval,
                "tensor_parallel_size": parallel.tensor_parallel_size,
                "data_parallel_size": parallel.data_parallel_size,
            },
        )
