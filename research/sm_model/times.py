"""From cycles to the time of a decode step, beside FlashAttention 3 on a BF16 cache."""

from dataclasses import dataclass

from benchmarks.gpu.llama import HEAD_SIZE, NUM_KV_HEADS
from research.sm_model.decode import Prediction

#: The step that is compared: requests and tokens of each.
BATCH, CONTEXT = 8, 32768
#: FlashAttention 3 reads the cache at this share of the bandwidth.
_FLASH_SHARE = 0.88
#: Launches of decode and merge that other work of the step does not hide, in seconds.
_LAUNCHES = 9e-6


@dataclass(frozen=True)
class Gpu:
    """bandwidth in bytes/s; clock in Hz under load."""

    bandwidth: float
    multiprocessors: int = 132
    clock: float = 1.98e9


GPUS = {"H100": Gpu(3.35e12), "H200": Gpu(4.8e12)}


def against_flash_attention(prediction: Prediction) -> dict[str, float]:
    """How many times faster than FlashAttention 3, by GPU: splits go round all multiprocessors of a KV head."""
    ratios = {}
    for name, gpu in GPUS.items():
        flash = BATCH * CONTEXT * NUM_KV_HEADS * HEAD_SIZE * 2 * 2 / (gpu.bandwidth * _FLASH_SHARE)
        workers = gpu.multiprocessors // NUM_KV_HEADS
        splits = -(-(BATCH * CONTEXT // prediction.split) // workers)
        cycles = splits * (prediction.split * prediction.cycles + prediction.split_cycles)
        ratios[name] = flash / (cycles / gpu.clock + _LAUNCHES)
    return ratios
