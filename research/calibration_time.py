"""Print how long a server learns a codebook on one GPU: computed, not measured.

python -m research.calibration_time                              Llama-3-8B at 1 bit on an H100
python -m research.calibration_time --gpu a100-80    elsewhere
"""

import argparse
from dataclasses import dataclass

from research.step_bound import MODELS
from vllm_antkv.calibrate.calibrate_on_start import num_samples
from vllm_antkv.calibrate.capture import CaptureShape
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.capacity.gpus import GPUS
from vllm_antkv.capacity.memory import DecodeShape
from vllm_antkv.offline.kmeans import MAX_POINTS
from vllm_antkv.offline.sinks import PROBE_TOKENS, PROBE_WINDOWS
from vllm_antkv.presets import PRESETS, get_preset

#: Of the model whose codebook is learned.
CONTEXT = 8192
#: Operations/s of a window's forward and backward pass, as a share of what large products sustain.
PASS_SHARE = 0.43
#: Bytes/s.
DISK = 1e9
#: Times that Lloyd's iterations together look at all points (`offline.kmeans`), and bytes that each score is read and
#: written with.
PASSES, SCORE_BYTES = 8, 16


@dataclass(frozen=True)
class Stage:
    """A row of the table."""

    name: str
    work: str
    assumed: str
    seconds: float


def stages(model: str, gpu_name: str, preset_name: str) -> list[Stage]:
    """What a server does before its first start with this preset, and how long each part takes."""
    shape, gpu, preset = DecodeShape.of(MODELS[model]), GPUS[gpu_name], get_preset(preset_name)
    samples, seq_len = num_samples(CONTEXT, preset_name, shape.head_size, "cuda"), CalibrationSettings.seq_len
    tokens = samples * seq_len
    rate = PASS_SHARE * gpu.flops

    # Forward, forward again (layers are recomputed) and backward to the activations alone.
    per_token = 3 * 2 * shape.matrix_weights
    captured = CaptureShape(shape.num_layers, samples, seq_len, shape.num_kv_heads, shape.head_size, 0).num_bytes

    problems = 2 * shape.heads * preset.num_sub_vectors(shape.head_size)
    points = min(tokens, MAX_POINTS * preset.num_centroids)
    scores = PASSES * problems * points * preset.num_centroids

    probed = min(samples, PROBE_WINDOWS) * PROBE_TOKENS
    return [
        Stage(
            "capturing",
            f"{tokens:,} tokens, {per_token / 1e9:.0f} GFLOP each (forward, again, backward without weights)",
            f"{rate / 1e12:.0f} TFLOP/s",
            tokens * per_token / rate,
        ),
        Stage("keeping it", f"{captured / 2**30:.1f} GiB", f"{DISK / 1e9:.0f} GB/s", captured / DISK),
        Stage(
            "clustering",
            f"{problems:,} problems of {points:,} rows, {scores:.1e} scores of {SCORE_BYTES} bytes",
            f"{gpu.bandwidth / 1e12:.1f} TB/s",
            SCORE_BYTES * scores / gpu.bandwidth,
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
    parser.add_argument("--preset", choices=PRESETS, default="antkv-1bit")
    given = parser.parse_args()
    found = stages(given.model, given.gpu, given.preset)
    print("| step | work | assumed | seconds |\n|---|---|---|---|")
    for stage in found:
        print(f"| {stage.name} | {stage.work} | {stage.assumed} | {stage.seconds:.0f} |")
    print(f"| all | | | {sum(stage.seconds for stage in found):.0f} |")


if __name__ == "__main__":
    main()
