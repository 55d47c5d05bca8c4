"""Print how long a server learns a codebook on one GPU: computed, not measured.

python -m research.calibration_time                              Llama-3-8B at 1 bit on an H100
python -m research.calibration_time --gpu a100-80 --cores 16     elsewhere
"""

import argparse
import math
from dataclasses import dataclass

from research.step_bound import MODELS
from vllm_antkv.calibrate.capture import CaptureShape
from vllm_antkv.calibrate.once import num_samples
from vllm_antkv.calibrate.own_text import BATCH
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.evaluate.capacity import DecodeShape
from vllm_antkv.evaluate.gpus import GPUS
from vllm_antkv.offline.kmeans import MAX_POINTS
from vllm_antkv.offline.sinks import PROBE_WINDOWS
from vllm_antkv.presets import get_preset

#: Of the model whose codebook is learned.
CONTEXT = 8192
#: Seconds that Python takes to launch the kernels of a layer.
LAUNCH = 30e-3 / 32
#: Operations/s of a window's forward and backward pass, as a share of what large products sustain.
PASS_SHARE = 0.43
#: Bytes/s.
DISK = 1e9
#: Times that a step of writing moves the keys and values of its windows: transformers' cache is copied as it grows.
CACHE_MOVES = 3
#: Seconds that scikit-learn took for one problem on a core of an EPYC (Zen 4), and its points.
#: Time goes with their number: each is compared with all centroids.
KMEANS = {
    "antkv-4bit": (0.41, 65_536),
    "antkv-2bit": (0.43, 65_536),
    "antkv-1bit": (0.44, 65_536),
    "antkv-0.75bit": (11.7, 262_144),
    "antkv-0.375bit": (14.5, 262_144),
}


@dataclass(frozen=True)
class Stage:
    """A row of the table."""

    name: str
    work: str
    assumed: str
    seconds: float


def stages(model: str, gpu_name: str, preset_name: str, cores: int) -> list[Stage]:
    """What a server does before its first start with this preset, and how long each part takes."""
    shape, gpu, preset = DecodeShape.of(MODELS[model]), GPUS[gpu_name], get_preset(preset_name)
    samples, seq_len = num_samples(CONTEXT, preset_name), CalibrationSettings.seq_len
    tokens = samples * seq_len
    rate = PASS_SHARE * gpu.flops

    steps = math.ceil(samples / BATCH) * (seq_len - 1)
    cached = min(samples, BATCH) * seq_len / 2 * shape.heads * shape.head_size * 4
    memory = (2 * shape.weights + CACHE_MOVES * cached) / gpu.bandwidth
    step = max(memory, LAUNCH * shape.num_layers)

    # Forward, forward again (layers are recomputed) and backward to the activations alone.
    per_token = 3 * 2 * shape.matrix_weights
    captured = CaptureShape(shape.num_layers, samples, seq_len, shape.num_kv_heads, shape.head_size, 0).num_bytes

    problems = 2 * shape.heads * preset.num_sub_vectors(shape.head_size)
    points = min(tokens, MAX_POINTS * preset.num_centroids)
    seconds, measured = KMEANS[preset_name]
    one = seconds * points / measured

    probed = min(samples, PROBE_WINDOWS) * seq_len
    return [
        Stage(
            "writing text",
            f"{steps:,} steps of {min(samples, BATCH)} windows; memory would allow {memory * 1e3:.0f} ms each",
            f"{step * 1e3:.0f} ms per step, the time to launch {shape.num_layers} layers from Python",
            steps * step,
        ),
        Stage(
            "capturing",
            f"{tokens:,} tokens, {per_token / 1e9:.0f} GFLOP each (forward, again, backward without weights)",
            f"{rate / 1e12:.0f} TFLOP/s",
            tokens * per_token / rate,
        ),
        Stage("keeping it", f"{captured / 2**30:.1f} GiB", f"{DISK / 1e9:.0f} GB/s", captured / DISK),
        Stage(
            "clustering",
            f"{problems:,} problems of {points:,} rows, {one:.2f} s each on one core of an EPYC (Zen 4)",
            f"{cores} such cores",
            problems * one / cores,
        ),
        Stage(
            "loading, looking for sinks",
            f"{2 * shape.weights / 1e9:.0f} GB read, {probed:,} tokens",
            f"{DISK / 1e9:.0f} GB/s",
            2 * shape.weights / DISK + probed * 2 * shape.matrix_weights / rate,
        ),
    ]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Llama-3-8B")
    parser.add_argument("--gpu", choices=GPUS, default="h100-80")
    parser.add_argument("--preset", choices=KMEANS, default="antkv-1bit")
    parser.add_argument("--cores", type=int, default=26, help="of the processor, for k-means")
    given = parser.parse_args()
    found = stages(given.model, given.gpu, given.preset, given.cores)
    print("| step | work | assumed | seconds |\n|---|---|---|---|")
    for stage in found:
        print(f"| {stage.name} | {stage.work} | {stage.assumed} | {stage.seconds:.0f} |")
    print(f"| all | | | {sum(stage.seconds for stage in found):.0f} |")


if __name__ == "__main__":
    main()
