"""The contract: every statement of what is relied on in vLLM, in the rooms of our code that rely on it."""

from scripts.vllm_contract.entries import attention, benchmarks, cache, config, engine, hooks, schedules, server
from scripts.vllm_contract.reliance import Reliance

#: Room of our code -> statements.
ROOMS: dict[str, tuple[Reliance, ...]] = {
    "hooks": hooks.ENTRIES,
    "configuration": config.ENTRIES,
    "attention": attention.ENTRIES,
    "cache": cache.ENTRIES,
    "server": server.ENTRIES,
    "engine, evaluation, tests": engine.ENTRIES,
    "benchmarks": benchmarks.ENTRIES,
    "tests of schedules": schedules.ENTRIES,
}
ENTRIES: tuple[Reliance, ...] = tuple(entry for entries in ROOMS.values() for entry in entries)

#: Classes that ours derive from: where vLLM asks `isinstance` of one, it decides about ours as about its own.
WATCHED: tuple[str, ...] = (
    "SlidingWindowSpec",
    "FullAttentionSpec",
    "AttentionSpec",
    "KVCacheSpec",
    "SingleTypeKVCacheManager",
    "AttentionBackend",
    "AttentionImpl",
    "AttentionLayerBase",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
)
