"""What a layer of a step costs the host, without a GPU: `antkv-1bit` against FlashAttention 3 as vLLM calls it.

Real steps of a layer as vLLM calls it on an H200, whose query heads are four times its KV heads. NVIDIA's driver is
replaced, so that everything above it is what a server runs: our Python, Triton's launcher, vLLM's. PyTorch's operators
work on tensors that have no memory, products on numbers; FlashAttention's end where vLLM's Python does. Both, and CuPy,
cost more on a GPU. Planning is what vLLM's metadata builders take, and what the first layer of a step takes longer
than the others. Times are of this thread on a processor, medians, both sides in turn. Needs gcc, Python's headers and
vLLM's build for CPUs.

    python -m benchmarks.host_cost                      # about a minute
    python -m benchmarks.host_cost --steps prompt-1024 --kv-heads 8 --json host.json
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.tables import table

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from benchmarks.host.antkv import AntKV
    from benchmarks.host.flash_attention import FlashAttention
    from vllm_antkv.ops.rows import StepRows

    Side = AntKV | FlashAttention

#: Numbers of new tokens and of all tokens of each request.
STEPS = {
    "prompt-1024": ([1024], [1024]),
    "prompt-8192": ([8192], [8192]),
    "prompt-8192-behind-122880": ([8192], [131_072]),
    "mixed-64+512": ([1] * 64 + [512], [2048] * 65),
    "decode-128": ([1] * 128, [2048] * 128),
}
#: Layers of a step that are timed behind the first.
LAYERS = 8


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 1], help="of the layer")
    parser.add_argument("--rounds", type=int, default=50, help="times that each step is run")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args()
    report: dict[str, list[dict[str, Any]]] = {"rows": [], "flash_attention": []}
    for num_kv_heads in arguments.kv_heads:
        sides = _sides(num_kv_heads)
        for step in arguments.steps:
            for name, measured in measure(sides, step, num_kv_heads, arguments.rounds).items():
                report[name].append({"step": step, "kv_heads": num_kv_heads} | measured)
    print(report_table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


def _sides(num_kv_heads: int) -> "dict[str, Side]":
    from benchmarks.host.antkv import AntKV
    from benchmarks.host.driver import driver
    from benchmarks.host.flash_attention import FlashAttention
    from benchmarks.host.step import engine_config

    driver()
    with tempfile.TemporaryDirectory() as folder:
        vllm_config = engine_config(Path(folder), num_kv_heads)
        return {"rows": AntKV(vllm_config, num_kv_heads), "flash_attention": FlashAttention(vllm_config, num_kv_heads)}


def measure(sides: "dict[str, Side]", step: str, num_kv_heads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Of each side, launches and microseconds of a layer behind the first one, and milliseconds of planning.

    They take turns, as processors are faster and slower by the second.
    """
    import torch

    from benchmarks.host.step import Batch

    batch = Batch(*STEPS[step])
    rows = batch.rows(num_kv_heads)
    output = torch.empty_like(rows.query, memory_format=torch.contiguous_format)
    batches = {name: [batch.metadata(size) for size in side.block_sizes] for name, side in sides.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    with torch.inference_mode():
        launches = {name: _launches(side, rows, output, batches[name]) for name, side in sides.items()}
        gc.disable()
        for _ in range(rounds):
            for name, side in sides.items():
                times[name].append(_times(side, rows, output, batches[name]))
        gc.enable()
    measured = {}
    for name, of_side in times.items():
        layer, plan = map(statistics.median, zip(*of_side, strict=True))
        measured[name] = {"launches_per_layer": launches[name], "host_us_per_layer": layer / 1e3, "plan_ms": plan / 1e6}
    return measured


def _times(
    side: "Side", rows: "StepRows", output: "torch.Tensor", batches: "Sequence[CommonAttentionMetadata]"
) -> tuple[float, float]:
    """Nanoseconds of a layer that is not the first, and of planning."""
    start = time.thread_time_ns()
    metadata = side.plan(batches)
    planned = time.thread_time_ns()
    with side.context(metadata):
        entered = time.thread_time_ns()
        side.run(rows, output, metadata)
        first = time.thread_time_ns()
        for _ in range(LAYERS):
            side.run(rows, output, metadata)
        end = time.thread_time_ns()
    layer = (end - first) / LAYERS
    return layer, planned - start + first - entered - layer


def _launches(
    side: "Side", rows: "StepRows", output: "torch.Tensor", batches: "Sequence[CommonAttentionMetadata]"
) -> int:
    """Of a layer that is not the first."""
    from benchmarks.host.driver import num_launches
    from benchmarks.host.hopper import CountedOperators

    metadata = side.plan(batches)
    with side.context(metadata):
        side.run(rows, output, metadata)
        before = num_launches()
        with CountedOperators() as operators:
            side.run(rows, output, metadata)
    return num_launches() - before + operators.num_launches


def report_table(report: dict[str, list[dict[str, Any]]]) -> str:
    """A line for each step and number of KV heads."""
    header = ["step", "KV heads", "launches a layer", "auto", "host, us a layer", "auto", "planning, ms", "auto"]
    lines = []
    for antkv, flash in zip(report["rows"], report["flash_attention"], strict=True):
        measured = [f"{side['launches_per_layer']}" for side in (antkv, flash)]
        measured += [f"{side['host_us_per_layer']:.0f}" for side in (antkv, flash)]
        measured += [f"{side['plan_ms']:.2f}" for side in (antkv, flash)]
        lines.append([antkv["step"], str(antkv["kv_heads"]), *measured])
    return table(header, lines)


if __name__ == "__main__":
    main()
