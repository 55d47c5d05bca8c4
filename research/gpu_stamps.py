"""Where the time of antkv_decode goes, as its warps see it: kernels that write down when they came to what.

On a GPU, beside what the model of a multiprocessor (research/sm_model) predicts of the same kernels; with --model the
model itself, for one CTA.

    python -m research.gpu_stamps --json FILE                          # a few seconds
    python -m research.gpu_stamps --model --json research/stamps.json    # no GPU, but nvcc; record predictions
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.antkv_layer import Requests, Tokens
from benchmarks.gpu.tables import table
from research.stamps import START_UP, StampedBackend, cycles_of
from vllm_antkv.ops.cuda import CudaOperations
from vllm_antkv.ops.cuda_backend import Backend, CudaBackend
from vllm_antkv.ops.paged import ReferenceOperations

#: One whose tables are in shared memory, and one whose tables are in L2.
PRESETS = ("antkv-1bit", "antkv-0.375bit")
PREDICTED = Path(__file__).with_name("stamps.json")
#: Requests and tokens of each: on a GPU, and in the model, which runs one CTA.
ON_GPU, MODELLED = (8, 32768), (1, 5120)


def main() -> None:
    """Measure or predict, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="predict, on this machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to this file")
    arguments = parser.parse_args()
    if arguments.model:
        predictions = {preset: predicted(preset) for preset in PRESETS}
        print(stamps_table({"rows": rows(predictions, {})}))
        if arguments.json:
            arguments.json.write_text(json.dumps(predictions, indent=1) + "\n")
        return
    from benchmarks.gpu.device import require_gpu, write_report

    require_gpu()
    found = {preset: measured(preset) for preset in PRESETS}
    report = {"rows": rows(json.loads(PREDICTED.read_text()), found)}
    write_report(arguments.json, report)
    print(stamps_table(report))


def measured(preset: str) -> dict[str, float]:
    """On the GPU, of a step that is warm."""
    requests = Requests(preset, *ON_GPU, 1)
    return stamped(requests, CudaBackend(torch.device("cuda", 0)), "cuda", rounds=3)


def predicted(preset: str) -> dict[str, float]:
    """By the model."""
    from research.sm_model.backend import ModelledBackend
    from research.sm_model.constants import Constants

    torch.manual_seed(0)
    requests, backend = Requests(preset, *MODELLED, 1, device="cpu"), ModelledBackend(Constants())
    pages = requests.state.vq.k_codes.untyped_storage()
    backend.streamed.append((pages.data_ptr(), pages.data_ptr() + pages.nbytes()))
    with np.errstate(all="ignore"):  # lanes that are switched off compute with whatever they hold
        return stamped(requests, backend, "cpu")


def stamped(requests: Requests, backend: Backend, device: str, rounds: int = 1) -> dict[str, float]:
    """Cycles of a warp by what it does (`cycles_of`) in the last of several rounds of the same step, with its votes."""
    stamping = StampedBackend(backend, device)
    state, step = requests.state, requests.step
    operations = CudaOperations(state, backend=stamping, triton=ReferenceOperations(state))
    tokens = Tokens.random(step.num_reqs, device)
    for _ in range(rounds):
        operations.run(tokens.rows, tokens.output, step)
    return cycles_of(stamping.stamps)


def rows(predictions: dict[str, dict[str, float]], found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """A row per preset and phase."""
    return [
        {"preset": preset, "phase": phase, "predicted": cycles, "measured": found.get(preset, {}).get(phase)}
        for preset, phases in predictions.items()
        for phase, cycles in phases.items()
    ]


def stamps_table(report: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        [
            row["preset"],
            f"{row['phase']}, once" if row["phase"] in START_UP else row["phase"],
            f"{row['predicted']:,.0f}",
            "" if row["measured"] is None else f"{row['measured']:,.0f}",
        ]
        for row in report["rows"]
    ]
    return table(["preset", "what a warp does", "cycles, predicted", "cycles, measured"], lines)


if __name__ == "__main__":
    main()
