"""Output tokens per second of real vLLM on this GPU, at the largest batch that fits into a fixed amount of KV memory.

A Llama-3-8B with random weights, prompts of random tokens, 1,024 tokens per request in the end (AnTKV, figure 7). Every
side has the same KV memory, and as many requests at a time as vLLM says fit into it. Sides run in processes that take
turns. The time of prefill alone is measured in a run of its own and taken off. What matrix products and attention leave
possible at a side's batch is computed (`vllm_antkv.evaluate.step_bound`): a side is judged by its share of that.

    python -m benchmarks.gpu_end_to_end                 # a minute or two per side and round
    python -m benchmarks.gpu_end_to_end --context 4096  # where attention is more of a step
    python -m benchmarks.gpu_end_to_end --sides auto antkv-1bit/triton --rounds 3
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.tables import end_to_end_table

#: Values of --kv-cache-dtype; after a slash, of our setting `kernels`.
SIDES = ("auto", "antkv-1bit/triton", "antkv-1bit/cuda", "fp8", "turboquant_4bit_nc", "turboquant_3bit_nc")
#: Tokens of an output, the last ones of a request.
OUTPUT = 128
#: Beyond this many requests at a time, the model's own matrices are what takes the time.
MAX_BATCH = 1024
#: Share of the cache that is filled: requests that preempt each other would measure something else.
FILLED = 0.95
#: Tokens per second that are possible for (side, batch); None where nothing is known of the cache or of the GPU.
Bound = Callable[[str, int], float | None]


def main() -> int:
    """Run the sides in turns, print the table, write the JSON."""
    arguments = _arguments()
    if arguments.worker:
        arguments.worker.write_text(
            json.dumps(work(arguments.model, arguments.sides[0], arguments.kv_gib, arguments.context))
        )
        return 0
    from benchmarks.gpu.device import described, require_gpu, write_report
    from benchmarks.gpu.llama import make_model

    require_gpu()
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in arguments.sides}
    with tempfile.TemporaryDirectory() as folder:
        presets = {side.partition("/")[0] for side in arguments.sides if side.startswith("antkv-")}
        model = make_model(Path(folder), sorted(presets), arguments.context)
        for number in range(arguments.rounds):
            for side in arguments.sides:
                print(f"round {number + 1} of {arguments.rounds}: {side}", file=sys.stderr, flush=True)
                rounds[side].append(_run_worker(model, side, arguments.kv_gib, arguments.context))
        bound = bounds_on_this_gpu(model, arguments.context)
    rows = [summary(side, results, bound) for side, results in rounds.items()]
    prompt = arguments.context - OUTPUT
    report = {"kv_gib": arguments.kv_gib, "prompt": prompt, "output": OUTPUT, "rows": rows}
    print(described(), end_to_end_table(report), sep="\n\n")
    write_report(arguments.json, report)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--rounds", type=int, default=1, help="processes per side")
    parser.add_argument("--kv-gib", type=float, default=8, help="KV memory of every side (default: 8)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a request in the end (default: 1024)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_worker(model: Path, side: str, kv_gib: float, context: int) -> dict[str, Any]:
    out = model / "worker.json"
    command = [sys.executable, "-m", "benchmarks.gpu_end_to_end", "--worker", str(out), "--model", str(model)]
    command += ["--sides", side, "--kv-gib", str(kv_gib), "--context", str(context)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    subprocess.run(command, env=environment, check=True)
    return dict(json.loads(out.read_text()))


def work(model: Path, side: str, kv_gib: float, context: int) -> dict[str, Any]:
    """One side: an engine in this process; its capacity, batch and seconds."""
    start = time.perf_counter()
    from vllm import LLM, SamplingParams

    kv_cache_dtype, _, kernels = side.partition("/")
    llm = LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype=kv_cache_dtype,
        additional_config={"antkv": {"kernels": kernels}} if kernels else {},
        kv_cache_memory_bytes=int(kv_gib * 2**30),
        max_model_len=context,
        max_num_seqs=MAX_BATCH,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        seed=0,
    )
    started = time.perf_counter() - start
    capacity = capacity_of(llm)
    batch = min(int(FILLED * capacity) // context, MAX_BATCH)
    prompts = [
        {"prompt_token_ids": [(7 * position + 131 * request) % 128_000 for position in range(context - OUTPUT)]}
        for request in range(batch)
    ]

    def seconds(max_tokens: int) -> float:
        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - begin

    llm.generate(prompts[:8], SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False), use_tqdm=False)
    prefill = seconds(1)
    return {
        "start_seconds": started,
        "capacity": capacity,
        "batch": batch,
        "prefill_seconds": prefill,
        "seconds": seconds(OUTPUT),
    }


def capacity_of(llm: Any) -> int:
    """Tokens that fit into the KV cache, as vLLM reports them."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    engine = llm.llm_engine
    kv_cache_config = engine.engine_core.engine_core.scheduler.kv_cache_config
    return int(get_kv_cache_capacity(engine.vllm_config, kv_cache_config)[0])


def bounds_on_this_gpu(model: Path, context: int) -> Bound:
    """Output tokens per second that are possible for a side at a batch, in the middle of the outputs; see `Bound`."""
    import torch
    from transformers import AutoConfig

    from vllm_antkv.evaluate.capacity import DecodeShape
    from vllm_antkv.evaluate.gpus import GPUS
    from vllm_antkv.evaluate.step_bound import step_bound

    name = torch.cuda.get_device_name()
    gpu = next((gpu for gpu in GPUS.values() if gpu.device == name), None)
    shape = DecodeShape.of(AutoConfig.from_pretrained(model))

    def bound(side: str, batch: int) -> float | None:
        cache = side.partition("/")[0]
        if gpu is None or cache.startswith("turboquant"):
            return None
        return step_bound(shape, gpu, cache, context - OUTPUT // 2, batch).tokens_per_second

    return bound


def summary(side: str, results: list[dict[str, Any]], bound: Bound) -> dict[str, Any]:
    """A row of the table from the results of a side's processes: medians, and the range of the speeds."""
    speeds = [result["batch"] * (OUTPUT - 1) / (result["seconds"] - result["prefill_seconds"]) for result in results]
    row = {name: statistics.median(result[name] for result in results) for name in results[0]}
    possible = bound(side, round(row["batch"]))
    speed = {"tokens_per_second": statistics.median(speeds), "spread": max(speeds) - min(speeds), "bound": possible}
    return {"side": side, **row, **speed}


if __name__ == "__main__":
    sys.exit(main())
