"""How fast a decode step can be on a GPU: what its matrix products and its attention take at least.

Attention is not all of a step. A cache that holds twelve times the tokens makes batches twelve times as large, and
their matrix products take twelve times as long, however fast attention is. So the gain over `auto` at the largest
batches is bounded, and by how much depends on the length of the sequences, the model and the GPU.

    matrices    the larger of: their operations at the GPU's sustained rate, their bytes at its bandwidth
    attention   16-bit: the bytes of K and V, at the share of the bandwidth that FlashAttention 3 uses; FP8: half of
                them; antkv: the larger of all bytes of a sequence, and the cycles that decode is designed for
    a step      both, one after the other; sampling, launches, all-reduces and the scheduler come on top

Everything is computed. Nothing here was measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.capacity import GPU_SHARE, WORKSPACE_BYTES, codebook_bytes
from vllm_antkv.presets import PRESETS

#: Share of the bandwidth that attention to a 16-bit or FP8 cache uses.
STREAMED = 0.88
#: Cycles of a multiprocessor per token and KV head that the CUDA kernels are designed for at head size 128, as a model
#: of it counts them; for 4 bits Triton's instructions, as if one were issued in every cycle.
DESIGN_CYCLES = {
    "antkv-4bit": 20.0,
    "antkv-2bit": 13.2,
    "antkv-1bit": 11.5,
    "antkv-0.75bit": 13.0,
    "antkv-0.375bit": 13.0,
}


@dataclass(frozen=True)
class Gpu:
    """memory in bytes, bandwidth in bytes/s, clock in Hz; flops: 16-bit operations/s that large products sustain."""

    memory: float
    bandwidth: float
    flops: float
    multiprocessors: int
    clock: float


GPUS = {
    "A100": Gpu(80e9, 2.04e12, 240e12, 108, 1.41e9),
    "H100": Gpu(80e9, 3.35e12, 700e12, 132, 1.755e9),
    "H200": Gpu(141e9, 4.8e12, 700e12, 132, 1.755e9),
}


@dataclass(frozen=True)
class DecodeShape:
    """What a decode step of a dense model in 16 bits multiplies and keeps.

    matrix_weights: numbers in its matrices, the output layer included; embeddings are looked up.
    weights: all numbers.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    matrix_weights: int
    weights: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "DecodeShape":
        """Counted without making the weights."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        total = sum(parameter.numel() for parameter in model.parameters())
        return cls(config.num_hidden_layers, config.num_key_value_heads, head_size, matrices, total)

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.num_layers * self.num_kv_heads


@dataclass(frozen=True)
class StepBound:
    """Of a decode step of `batch` requests: seconds of its parts, and output tokens per second."""

    kv_cache_dtype: str
    context: int
    batch: int
    matrices: float
    attention: float

    @property
    def tokens_per_second(self) -> float:
        """With both parts as long as they are at least."""
        return self.batch / (self.matrices + self.attention)

    @property
    def matrices_alone(self) -> float:
        """Tokens per second if attention took no time at all."""
        return self.batch / self.matrices


def step_bound(shape: DecodeShape, gpu: Gpu, kv_cache_dtype: str, context: int, batch: int) -> StepBound:
    """Of `batch` requests of `context` tokens each; `kv_cache_dtype` is `auto`, `fp8` or a preset."""
    operations = 2 * shape.matrix_weights * batch / gpu.flops
    matrices = max(operations, 2 * shape.matrix_weights / gpu.bandwidth)
    num_bytes = batch * shape.heads * sequence_bytes(shape, kv_cache_dtype, context)
    attention = num_bytes / (STREAMED * gpu.bandwidth)
    if kv_cache_dtype in PRESETS:
        cycles = batch * context * shape.heads * DESIGN_CYCLES[kv_cache_dtype] * shape.head_size / 128
        attention = max(attention, cycles / (gpu.multiprocessors * gpu.clock))
    return StepBound(kv_cache_dtype, context, batch, matrices, attention)


def largest_batch(shape: DecodeShape, gpu: Gpu, kv_cache_dtype: str, context: int) -> int:
    """Requests of `context` tokens that fit beside weights, codebooks and WORKSPACE_BYTES."""
    codebooks = 0
    if kv_cache_dtype in PRESETS:
        codebooks = shape.heads * codebook_bytes(PRESETS[kv_cache_dtype], shape.head_size)
    pool = GPU_SHARE * gpu.memory - 2 * shape.weights - codebooks - WORKSPACE_BYTES
    return max(0, int(pool / (shape.heads * sequence_bytes(shape, kv_cache_dtype, context))))


def sequence_bytes(shape: DecodeShape, kv_cache_dtype: str, context: int) -> float:
    """Of a sequence, per layer and KV head, everything counted; with the default settings."""
    if kv_cache_dtype not in PRESETS:
        return 2 * context * shape.head_size * {"auto": 2, "fp8": 1}[kv_cache_dtype]
    config = AntKVConfig()
    layout = PageLayout.of(config, PRESETS[kv_cache_dtype], shape.head_size, torch.bfloat16)
    return footprint([layout], config, context).total


def bounds(shape: DecodeShape, gpu: Gpu, caches: Sequence[str], contexts: Sequence[int]) -> Iterator[StepBound]:
    """At the largest batches, by context and cache; none where the model does not fit."""
    for context in contexts:
        for cache in caches:
            batch = largest_batch(shape, gpu, cache, context)
            if batch:
                yield step_bound(shape, gpu, cache, context, batch)
