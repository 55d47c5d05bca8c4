"""KV tokens that fit beside a Llama-3-8B on a GPU with 80 GB, as real vLLM reports them on this GPU.

On a larger GPU vLLM is given 80 GB of it. Weights are random, lengths go up to 32,768 tokens.

    python -m benchmarks.gpu_capacity                   # less than a minute per side
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.tables import capacity_table

SIDES = ("auto", "antkv-1bit", "antkv-0.375bit")
MAX_LEN = 32_768
#: 80 GB, as NVIDIA counts them.
GPU_BYTES = 80e9
#: vLLM's default share of the GPU.
UTILISATION = 0.9


def main() -> int:
    """Ask every side, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), help="values of --kv-cache-dtype")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        arguments.worker.write_text(json.dumps(capacity(arguments.model, arguments.sides[0])))
        return 0
    from benchmarks.gpu.device import require_gpu, write_report
    from benchmarks.gpu.llama import make_model

    require_gpu()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), [side for side in arguments.sides if side.startswith("antkv-")], MAX_LEN)
        rows = [{"side": side, "tokens": _run_worker(model, side)} for side in arguments.sides]
    report = {"max_len": MAX_LEN, "gpu_bytes": GPU_BYTES, "rows": rows}
    print(capacity_table(report))
    write_report(arguments.json, report)
    return 0


def _run_worker(model: Path, side: str) -> int:
    out = model / "worker.json"
    command = [sys.executable, "-m", "benchmarks.gpu_capacity", "--worker", str(out), "--model", str(model)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    subprocess.run([*command, "--sides", side], env=environment, check=True)
    return int(json.loads(out.read_text()))


def capacity(model: Path, side: str) -> int:
    """Start an engine in this process and read what it says."""
    import torch
    from vllm import LLM

    from benchmarks.gpu_end_to_end import capacity_of

    share = min(1.0, GPU_BYTES / torch.cuda.get_device_properties(0).total_memory)
    llm = LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype=side,
        gpu_memory_utilization=UTILISATION * share,
        max_model_len=MAX_LEN,
        enforce_eager=True,
    )
    return capacity_of(llm)


if __name__ == "__main__":
    sys.exit(main())
