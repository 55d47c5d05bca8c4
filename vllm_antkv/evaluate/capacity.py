"""How many tokens the cache of a GPU holds, computed from a model's sizes alone: for choosing a preset before a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.presets import PRESETS, Preset

#: vLLM's default --gpu-memory-utilization.
GPU_SHARE = 0.92
#: Assumed for activations and CUDA graphs, which only a run can tell.
WORKSPACE_BYTES = 2e9


@dataclass(frozen=True)
class Capacity:
    """Of one `--kv-cache-dtype`.

    bits: per K or V element of a sequence, everything counted.
    codebook_bytes: of the centroids as they are stored.
    tokens: for each GPU, tokens in sequences of the given length; 0 where the model does not fit.
    """

    kv_cache_dtype: str
    bits: float
    codebook_bytes: int
    tokens: list[int]


def capacities(card: ModelCard, config: AntKVConfig, context: int, memory: Sequence[float]) -> Iterator[Capacity]:
    """`auto` and every preset that fits the model's heads.

    A GPU's cache has what is left of GPU_SHARE of its memory after weights, codebooks and WORKSPACE_BYTES.

    Args:
        card: the model; its weights are not read.
        config: the antkv settings.
        context: tokens of a sequence; short ones pay more for what stays in full precision.
        memory: GB (1e9 bytes) of each GPU.
    """
    identity = card.identity
    heads = identity.num_layers * identity.num_kv_heads
    weights = weight_bytes(card)
    full = 2 * identity.head_size * card.dtype.itemsize * context
    sizes = [("auto", full, 0)]
    for preset in PRESETS.values():
        if identity.head_size % preset.sub_vector_size == 0:
            cost = footprint([PageLayout.of(config, preset, identity.head_size, card.dtype)], config, context)
            sizes.append((preset.name, cost.total, heads * codebook_bytes(preset, identity.head_size)))
    for name, per_head, codebooks in sizes:
        pools = (GPU_SHARE * 1e9 * size - weights - codebooks - WORKSPACE_BYTES for size in memory)
        tokens = [max(0, int(pool * context / (heads * per_head))) for pool in pools]
        yield Capacity(name, 8 * per_head / (2 * identity.head_size * context), codebooks, tokens)


def weight_bytes(card: ModelCard) -> int:
    """Bytes of the model's parameters in the dtype of its checkpoint, counted without making them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(card.config)
    return int(sum(parameter.numel() for parameter in model.parameters()) * card.dtype.itemsize)


def codebook_bytes(preset: Preset, head_size: int) -> int:
    """Of one layer and KV head: K and V centroids in float16."""
    return 2 * preset.num_centroids * head_size * 2
