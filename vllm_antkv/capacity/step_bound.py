"""How fast a decode step can be on a GPU: what its matrix products and its attention take at least.

Attention is not all of a step. A cache that holds twelve times the tokens makes batches twelve times as large, and
their matrix products take twelve times as long, however fast attention is. So the gain over `auto` at the largest
batches is bounded, and by how much depends on the length of the sequences, the model and the GPU.

    matrices    the larger of: their operations at the GPU's sustained rate, their bytes at its bandwidth
    attention   16-bit: the bytes of K and V, at the share of the bandwidth that FlashAttention 3 uses; FP8: half of
                them; antkv: the larger of all bytes of a sequence, and the cycles that decode takes: of its
                tokens, and of the sequence beside them, for it sees up to 128 rows of its own block in full
                precision
    a step      both, one after the other; sampling, launches, all-reduces and the scheduler come on top

Cycles of 1 bit and of Triton's kernels were measured on an H200 (docs/performance.md); all else is computed. Which of
the two run follows from the rule that servers follow, as far as a config tells what layers are.
"""

import math
from dataclasses import dataclass

import torch

from vllm_antkv.capacity.gpus import Gpu
from vllm_antkv.capacity.memory import DecodeShape, sequence_bytes
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.cuda import SPLIT, unsupported
from vllm_antkv.ops.layer import LayerKind
from vllm_antkv.presets import PRESETS, parts_of_mix

#: Share of the bandwidth that attention to a 16-bit or FP8 cache uses.
STREAMED = 0.88


@dataclass(frozen=True)
class Cycles:
    """Of a multiprocessor per KV head at head size 128.

    token: of each token. request: besides, of a request whose own block is full, as one split. split: of each more.
    """

    token: float
    request: float = 0
    split: float = 0


#: Of the CUDA kernels, at the clocks of `GPUS`. 1 bit fits what an H200 took; others are 1.2 times what
#: research/sm_model predicts, as 1 bit is; 0.5 and 0.375 bit, whose layers look up half as often, are those of 1 bit.
DECODE_CYCLES = {
    "antkv-4bit": Cycles(17.3, 16_800, 5_100),
    "antkv-2bit": Cycles(14.0, 14_700, 4_300),
    "antkv-1bit": Cycles(12.3, 11_300, 4_600),
    "antkv-0.75bit": Cycles(17.0, 12_800, 4_400),
    "antkv-0.5bit": Cycles(12.3, 11_300, 4_600),
    "antkv-0.375bit": Cycles(12.3, 11_300, 4_600),
}
#: Of Triton's kernels, of any preset those of 1 bit.
TRITON_CYCLES = Cycles(61.0, 15_700)


@dataclass(frozen=True)
class StepBound:
    """Of a decode step of `batch` requests: bytes read, seconds of its parts, and output tokens per second."""

    batch: int
    read_bytes: float
    matrices: float
    attention: float

    @property
    def tokens_per_second(self) -> float:
        """With both parts as long as they are at least."""
        return self.batch / (self.matrices + self.attention)


def step_bound(
    shape: DecodeShape, gpu: Gpu, kv_cache_dtype: str, context: int, batch: int, settings: AntKVConfig | None = None
) -> StepBound:
    """Of `batch` requests of `context` tokens each; `kv_cache_dtype` is `auto`, `fp8` or a preset."""
    operations, weight_bytes = 2 * shape.matrix_weights * batch, 2 * shape.matrix_weights
    matrices = max(operations / gpu.flops, weight_bytes / gpu.bandwidth)
    kv_bytes = batch * shape.heads * sequence_bytes(shape, kv_cache_dtype, context, settings)
    attention = kv_bytes / (STREAMED * gpu.bandwidth)
    if kv_cache_dtype in PRESETS:
        layers = [_layer_cycles(shape, gpu, kv_cache_dtype, context, window) for window in _windows(shape)]
        cycles = batch * shape.heads * sum(layers) / len(layers) * shape.head_size / 128
        attention = max(attention, cycles / (gpu.multiprocessors * gpu.clock))
    return StepBound(batch, weight_bytes + kv_bytes, matrices, attention)


def kernels(shape: DecodeShape, gpu: Gpu, preset: str) -> str:
    """Those that decode layers of a codebook as calibrated by default: `cuda`, `triton`, or `cuda+triton`."""
    names = {"cuda" if _runs_on_cuda(shape, gpu, preset, window) else "triton" for window in _windows(shape)}
    return "+".join(sorted(names))


def _windows(shape: DecodeShape) -> tuple[int | None, ...]:
    return shape.windows or (None,)


def _runs_on_cuda(shape: DecodeShape, gpu: Gpu, preset: str, window: int | None) -> bool:
    """As servers choose (`ops.cuda.unsupported`), of the layers that a mix has most of: those nearest in bits."""
    asked_for = PRESETS[preset]
    parts = parts_of_mix(asked_for, shape.head_size) or [asked_for]
    nearest = min(parts, key=lambda part: abs(part.nominal_bits - asked_for.nominal_bits))
    layer = LayerKind(nearest, shape.head_size, shape.group, torch.bfloat16, None, plain_logits=window is None)
    return unsupported(layer, gpu) is None


def _layer_cycles(shape: DecodeShape, gpu: Gpu, preset: str, context: int, window: int | None) -> float:
    """Of a multiprocessor per KV head at head size 128, for a sequence of `context` tokens."""
    cycles = DECODE_CYCLES[preset] if _runs_on_cuda(shape, gpu, preset, window) else TRITON_CYCLES
    seen = min(context, window or context)
    return seen * cycles.token + cycles.request + (math.ceil(seen / SPLIT) - 1) * cycles.split
