"""Prefill of one prompt in one layer of a Llama-3-8B on this GPU: ours, by operation, against FlashAttention 3.

FlashAttention 3 computes attention alone, on rows in bfloat16. Ours stores the prompt's codes (encode_store, and the
CUDA kernel for it), chooses the anchors of its blocks (anchor_score) and attends: through FlashAttention on plain rows
(attend), as served, and by the Triton kernel alone (attend, Triton). Behind a past the rows are decoded for it first.

    python -m benchmarks.gpu_prefill                    # about half a minute
    python -m benchmarks.gpu_prefill --tokens 8192 --past 122880
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.llama import HEAD_SIZE
from benchmarks.gpu.tables import prefill_table

if TYPE_CHECKING:
    import torch

PRESET = "antkv-1bit"
BASELINE = "FlashAttention 3, bfloat16"


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024, 8192, 32768], help="new ones")
    parser.add_argument("--past", type=int, nargs="+", default=[0, 8192], help="tokens before them")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args()
    from benchmarks.gpu.device import described, require_gpu, write_report
    from benchmarks.gpu.timing import failed

    require_gpu()
    rows: list[dict[str, Any]] = []
    report = {"baseline": BASELINE, "preset": PRESET, "rows": rows}
    for past, tokens in itertools.product(arguments.past, arguments.tokens):
        rows.append(row(tokens, past))
        write_report(arguments.json, report)
    print(described(), prefill_table(report), sep="\n\n")
    return int(any(failed(row["timings"]) for row in rows))


def row(num_tokens: int, past: int) -> dict[str, Any]:
    """Both sides on so many tokens behind a past."""
    from benchmarks.gpu import flash_attention as rows_of_bfloat16
    from benchmarks.gpu.antkv_layer import Requests, Tokens
    from benchmarks.gpu.timing import attempt
    from vllm_antkv.ops.cuda import CudaOperations
    from vllm_antkv.ops.triton import TritonOperations
    from vllm_antkv.ops.varlen import plan_rounds, prefill_limits
    from vllm_antkv.vllm_adapter.step.flash_attention import flash_attention

    requests, tokens = Requests(PRESET, [past + num_tokens], num_tokens), Tokens.random(num_tokens)
    triton, cuda = TritonOperations(requests.state), CudaOperations(requests.state)
    varlen = flash_attention(HEAD_SIZE, tokens.rows.query.dtype, num_tokens)
    layer = replace(requests.state, varlen=varlen)
    operations, limits = TritonOperations(layer), prefill_limits(layer, layer.recency.score_slots)
    assert limits is not None
    rows, output, step = tokens.rows, tokens.output, requests.step
    whole = Tokens.random(past + num_tokens).rows
    assert step.query_start_loc_cpu is not None
    rounds = plan_rounds(step.query_start_loc_cpu, step.seq_lens.cpu(), limits, output.device)
    step = replace(step, rounds=rounds)
    sides = {
        BASELINE: rows_of_bfloat16.prefill(rows.query, whole.key, whole.value),
        "encode_store, CUDA": lambda: cuda.encode_store(rows, step),
        "encode_store": lambda: operations.encode_store(rows, step),
        "anchor_score": lambda: operations.anchor_score(rows, step),
        "attend": lambda: operations.attend(rows, output, step),
        "attend, Triton": lambda: triton.attend(rows, output, step),
    }
    timings = {}
    # In the order of a step: each operation reads what the one before it wrote.
    for name, run in sides.items():
        print(f"{num_tokens} tokens behind {past}: {name}", file=sys.stderr, flush=True)
        timings[name] = attempt(partial(_measured, run, tokens.output if name.startswith("attend") else None))
    return {"tokens": num_tokens, "past": past, "timings": timings}


def _measured(run: Callable[[], object], output: "torch.Tensor | None") -> dict[str, Any]:
    from benchmarks.gpu.timing import measure

    timing = measure(run, graph=False)
    if output is not None and not output.isfinite().all():
        raise ArithmeticError("the output has numbers that are not finite")
    return timing


if __name__ == "__main__":
    sys.exit(main())
