"""Writing tokens to the cache in one layer of a Llama-3-8B on this GPU: our Triton and our CUDA kernel.

python -m benchmarks.gpu_encode_store               # seconds
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.llama import BFLOAT16_BYTES
from benchmarks.gpu.tables import encode_store_table

PRESET = "antkv-1bit"
KERNELS = ("triton", "cuda")


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256, 1024, 8192], help="of one request")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args()
    from benchmarks.gpu.device import require_gpu, write_report
    from benchmarks.gpu.timing import failed, memory_bandwidth

    require_gpu()
    bandwidth = memory_bandwidth()
    rows: list[dict[str, Any]] = []
    report = {"preset": PRESET, "bandwidth": bandwidth, "rows": rows}
    for tokens in arguments.tokens:
        rows.append(row(tokens, bandwidth))
        write_report(arguments.json, report)
    print(encode_store_table(report))
    return int(any(failed(row["sides"]) for row in rows))


def row(num_tokens: int, bandwidth: float) -> dict[str, Any]:
    """All kernels on one request; the bytes are those of the rows that are read."""
    from benchmarks.gpu.timing import attempt

    return {
        "tokens": num_tokens,
        "sides": {kernels: attempt(partial(_measured, kernels, num_tokens, bandwidth)) for kernels in KERNELS},
    }


def _measured(kernels: str, num_tokens: int, bandwidth: float) -> dict[str, Any]:
    import torch

    from benchmarks.gpu.antkv_layer import Requests, Tokens
    from benchmarks.gpu.timing import measure
    from vllm_antkv.ops.dispatch import choose

    requests, tokens = Requests(PRESET, 1, num_tokens, new=num_tokens), Tokens.random(num_tokens)
    operations: Any = choose(kernels, torch.device("cuda", 0)).build(requests.state)
    timing = measure(lambda: operations.encode_store(tokens.rows, requests.step), graph=True)
    return timing.moving(num_tokens * BFLOAT16_BYTES, bandwidth)


if __name__ == "__main__":
    sys.exit(main())
