"""What a start costs more with an antkv cache than with `auto`, in seconds of the processor, not of the clock.

    python -m benchmarks.startup
    python -m benchmarks.startup --model DIR --kv-cache-dtype antkv-0.375bit --rounds 3

An engine starts in a process of its own, in turns with each dtype; the parts of it that are ours are timed where vLLM
calls them. `vllm serve` registers the plugin in each of its processes, reads the codebook in the first one and in every
worker, and attaches in every worker. Last, the same reading and attaching for the sizes of Llama-3-8B, computed without
its weights.
"""

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, ModelIdentity, codebook_path
from vllm_antkv.config import AntKVConfig
from vllm_antkv.presets import get_preset
from vllm_antkv.select.recency import last_query_table

MODEL = Path(__file__).parents[1] / "models" / "embedded"
#: Module and name of what our hooks import and call once the cache is ours.
CALLED = {
    "codebook found and checked": ("vllm_antkv.vllm_adapter.attention.startup", "complete"),
    "layers attached": ("vllm_antkv.vllm_adapter.attention.attach", "attach"),
}
REGISTERED = "plugin registered"
#: How often in a server on one device: in the API server, the engine core and, on a CPU, the worker beside it.
TIMES = {REGISTERED: 3, **dict.fromkeys(CALLED, 1)}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
LLAMA_3_8B = ModelIdentity(
    architecture="LlamaForCausalLM",
    num_layers=32,
    num_attention_heads=32,
    num_kv_heads=8,
    head_size=128,
    hidden_size=4096,
    vocab_size=128256,
)
LLAMA_3_8B_TOKENS = 8192


def main() -> None:
    """Print both tables."""
    arguments = _arguments()
    if arguments.start:
        print(json.dumps(_start(arguments.model, arguments.start)))
        return
    found: dict[str, list[dict[str, float]]] = {"auto": [], arguments.kv_cache_dtype: []}
    for _ in range(arguments.rounds):
        for dtype, starts in found.items():
            starts.append(_start_apart(arguments.model, dtype))
    _print_starts(found)
    _print_sizes(arguments.kv_cache_dtype)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--kv-cache-dtype", default="antkv-1bit")
    parser.add_argument("--rounds", type=int, default=3, help="Starts with each dtype; the median is shown.")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    return parser.parse_args()


def _start_apart(model: str, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.startup", "--model", model, "--start", dtype]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def _start(model: str, dtype: str) -> dict[str, float]:
    """Start an engine in this process; seconds of each part, and of all."""
    begin = time.process_time()
    # vLLM's modules first, so that they are not counted as the plugin's, which imports them too.
    from vllm import LLM

    from vllm_antkv.plugin import register

    times = dict.fromkeys(TIMES, 0.0)
    before = time.process_time()
    register()
    times[REGISTERED] = time.process_time() - before
    for part, place in CALLED.items() if dtype != "auto" else ():
        _time(part, place, times)
    LLM(model, kv_cache_dtype=dtype, enforce_eager=True)
    return times | {"all": time.process_time() - begin}


def _time(part: str, place: tuple[str, str], times: dict[str, float]) -> None:
    """Add up the seconds of a function, and of importing it."""
    module, name = place
    before = time.process_time()
    original = getattr(importlib.import_module(module), name)
    times[part] += time.process_time() - before

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            times[part] += time.process_time() - begin

    setattr(sys.modules[module], name, timed)


def _print_starts(found: dict[str, list[dict[str, float]]]) -> None:
    medians = {
        dtype: {part: statistics.median(times[part] for times in starts) for part in starts[0]}
        for dtype, starts in found.items()
    }
    auto, ours = medians.values()
    table = Table("seconds of the processor", *found, "times in a server", title="One start of an engine")
    for part, times in TIMES.items():
        table.add_row(part, f"{auto[part]:.2f}", f"{ours[part]:.2f}", str(times))
    table.add_row("all, with vLLM", f"{auto['all']:.2f}", f"{ours['all']:.2f}", "")
    Console().print(table)


def _print_sizes(dtype: str) -> None:
    """Of the steps whose time grows with the model."""
    table = Table("seconds of the processor", dtype, title="The same for the sizes of Llama-3-8B")
    with tempfile.TemporaryDirectory() as folder:
        path = codebook_path(Path(folder), dtype)
        _random_codebook(dtype).save(path)
        begin = time.process_time()
        codebook = Codebook.load(path)
        loaded = time.process_time()
        for centroids in (*codebook.k, *codebook.v):
            centroids.to(torch.float32)
        converted = time.process_time()
        last_query_table(AntKVConfig(), LLAMA_3_8B_TOKENS)
        tabled = time.process_time()
        table.add_row(
            f"codebook of {path.stat().st_size >> 20} MiB read and checked, twice", f"{2 * (loaded - begin):.2f}"
        )
    table.add_row("centroids converted", f"{converted - loaded:.2f}")
    table.add_row(f"table of the last queries, {LLAMA_3_8B_TOKENS} tokens", f"{tabled - converted:.3f}")
    Console().print(table)


def _random_codebook(dtype: str) -> Codebook:
    preset, model = get_preset(dtype), LLAMA_3_8B
    header = CodebookHeader(
        format_version=FORMAT_VERSION, preset=dtype, model=model, sinks=None, calibration={"text": "random"}
    )
    shape = (
        model.num_kv_heads,
        preset.num_sub_vectors(model.head_size),
        preset.num_centroids,
        preset.sub_vector_size,
    )
    k, v = (tuple(torch.randn(shape).half() for _ in range(model.num_layers)) for _ in "kv")
    return Codebook(header, k, v)


if __name__ == "__main__":
    main()
