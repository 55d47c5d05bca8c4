"""Decode attention of one layer of a Llama-3-8B on this GPU: antkv against what vLLM ships, in one process.

FlashAttention 3 on bfloat16 and FP8 caches, TurboQuant's 3-bit and 4-bit kernels, our Triton and CUDA kernels. Every
side is captured in a CUDA graph, since vLLM decodes so, and timed with a cold L2 cache. Writing the new token to the
cache is part of no side but `whole step`, which does all that ours does in a layer: encodes it, counts votes, and
closes the blocks that fill.

    python -m benchmarks.gpu_decode                     # about two minutes
    python -m benchmarks.gpu_decode --contexts 32768 --batches 8
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.llama import BFLOAT16_BYTES
from benchmarks.gpu.tables import decode_table
from vllm_antkv.config import AntKVConfig

#: What the others are measured against.
BASELINE = "FlashAttention 3, bfloat16"
PRESET = "antkv-1bit"
#: A bfloat16 cache beyond this is not built: it takes longer to fill than to measure, and shows nothing new.
MAX_CACHE_BYTES = 20 << 30
#: Fills a side's cache; returns what runs one step, and the bytes of the cache that it reads.
Prepare = Callable[[], tuple[Callable[[], Any], int]]


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--anchor-share", type=float, help="of antkv's cache; 0: no sinks either (default: ours)")
    parser.add_argument("--splits", type=int, nargs="+", default=[], help="also time splits of so many tokens, in CUDA")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args()
    from benchmarks.gpu.device import described, require_gpu, write_report
    from benchmarks.gpu.timing import failed, memory_bandwidth

    require_gpu()
    bandwidth = memory_bandwidth()
    rows: list[dict[str, Any]] = []
    report = {"baseline": BASELINE, "preset": PRESET, "bandwidth": bandwidth, "rows": rows}
    for context, batch in settings(arguments.contexts, arguments.batches):
        rows.append(row(context, batch, bandwidth, config_of(arguments.anchor_share), arguments.splits))
        write_report(arguments.json, report)
    print(described(), decode_table(report), sep="\n\n")
    # A side that could not run is in the table; the exit status says so too.
    return int(any(failed(row["sides"]) for row in rows))


def settings(contexts: list[int], batches: list[int]) -> list[tuple[int, int]]:
    """Pairs of a context and a batch whose bfloat16 cache is small enough."""
    return [(c, b) for c in contexts for b in batches if c * b * BFLOAT16_BYTES <= MAX_CACHE_BYTES]


def config_of(anchor_share: float | None) -> AntKVConfig:
    """The default settings, or those with another share of anchors."""
    return AntKVConfig() if anchor_share is None else AntKVConfig(anchor_share=anchor_share, sinks=anchor_share > 0)


def row(context: int, batch: int, bandwidth: float, config: AntKVConfig, splits: Sequence[int] = ()) -> dict[str, Any]:
    """All sides on one setting."""
    from benchmarks.gpu import flash_attention, turboquant
    from benchmarks.gpu.timing import attempt

    others = "" if config == AntKVConfig() else f", anchors {config.anchor_share:g}"
    sides: dict[str, Prepare] = {
        BASELINE: partial(flash_attention.decode, batch, context, fp8=False),
        "FlashAttention 3, FP8": partial(flash_attention.decode, batch, context, fp8=True),
        "TurboQuant, 4 bit": partial(turboquant.decode, batch, context, "turboquant_4bit_nc"),
        "TurboQuant, 3 bit": partial(turboquant.decode, batch, context, "turboquant_3bit_nc"),
        f"antkv, Triton{others}": partial(_antkv, batch, context, "triton", config),
        f"antkv, CUDA{others}": partial(_antkv, batch, context, "cuda", config),
        f"antkv, CUDA{others}, whole step": partial(_antkv, batch, context, "cuda", config, whole=True),
    }
    for split in splits:
        name = f"antkv, CUDA{others}, splits of {split}"
        sides[name] = partial(_antkv, batch, context, "cuda", config, split=split)
    measured: dict[str, Any] = {}
    for name, prepare in sides.items():
        print(f"{context} tokens, batch {batch}: {name}", file=sys.stderr, flush=True)
        measured[name] = attempt(partial(_measured, prepare, bandwidth))
    return {"context": context, "batch": batch, "sides": measured}


def _measured(prepare: Prepare, bandwidth: float) -> dict[str, Any]:
    from benchmarks.gpu.timing import measure

    run, num_bytes = prepare()
    if not run().isfinite().all():
        raise ArithmeticError("the output has numbers that are not finite")
    timing = measure(run, graph=True)
    return timing | {"bytes": num_bytes, "roofline": num_bytes / (timing["median_ms"] / 1e3) / bandwidth}


def _antkv(
    batch: int, context: int, kernels: str, config: AntKVConfig, whole: bool = False, split: int | None = None
) -> tuple[Callable[[], Any], int]:
    import torch

    from benchmarks.gpu.antkv_layer import Requests, Tokens, in_any_phase
    from vllm_antkv.ops.cuda import CudaOperations
    from vllm_antkv.ops.dispatch import choose

    requests = Requests(PRESET, in_any_phase(batch, context), 1, config)
    tokens = Tokens.random(batch)
    (chosen,) = choose(kernels, torch.device("cuda", 0), [requests.state.kind])
    build = chosen.kernels.build if split is None else partial(CudaOperations, split=split)
    operations = build(requests.state)
    timed = operations.run if whole else operations.attend

    def run() -> torch.Tensor:
        timed(tokens.rows, tokens.output, requests.step)
        return tokens.output

    return run, requests.kv_bytes


if __name__ == "__main__":
    sys.exit(main())
