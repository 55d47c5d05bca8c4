"""Seconds to the first token of a prompt: computed, and restored from a folder by an engine that has just started.

python -m research.page_store MODEL --codebooks DIR

Pages of antkv go through `AntKVStore`, those of `auto` through vLLM's ExampleConnector. What is restored is in memory.
What the folder costs prompts that are not in it is measured on one engine, in turn with and without.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

STORES = {"antkv-1bit": ("AntKVStore", "folder"), "auto": ("ExampleConnector", "shared_storage_path")}
#: Prompts that are computed, and how often one is restored.
TIMES = 3
#: Pairs of prompts, with the folder and without.
PAIRS = 12


def main() -> None:
    """Print a line for each cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--codebooks", help="folder; default: where the server looks")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    # ExampleConnector looks for one token less than it stores: not at the edge of a block.
    parser.add_argument("--context", type=int, default=8066, help="tokens of the prompt")
    given = parser.parse_args()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    for dtype in STORES:
        with tempfile.TemporaryDirectory() as folder:
            computed = in_new_process(first_tokens, given, dtype, folder, range(TIMES))
            num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            restored = in_new_process(first_tokens, given, dtype, folder, [0] * TIMES)
        a_token = f"{num_bytes / given.context / TIMES:,.0f} bytes a token"
        print(f"{dtype}: computed {computed:.2f} s, restored {restored:.2f} s, {a_token}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(f"a prompt that misses takes {in_new_process(misses, given, folder):.3f} of the time without a folder")


def in_new_process(measure: Callable[..., float], *arguments: Any) -> float:
    """What it gives there."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as fresh:
        return fresh.submit(measure, *arguments).result()


def misses(given: argparse.Namespace, folder: str) -> float:
    """The median, over pairs of prompts, of the time with the folder by that without."""
    # So that the scheduler's side of the connector is in this process, and the worker's side can be told.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    llm = _engine(given, "antkv-1bit", folder)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    ratios = []
    _first_token(llm, given.context, 0)
    for seed in range(1, PAIRS + 1):
        seconds = {}
        # Either comes first as often.
        for stopped in (True, False)[:: 1 - 2 * (seed % 2)]:
            scheduler.connector._stopped = stopped
            llm.collective_rpc(partial(_stop, stopped=stopped))
            seconds[stopped] = _first_token(llm, given.context, 2 * seed + stopped)
        ratios.append(seconds[False] / seconds[True])
    print("with by without:", ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios)), flush=True)
    llm.llm_engine.engine_core.shutdown()
    return statistics.median(ratios)


def _stop(worker: Any, stopped: bool) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    # What the last prompt left to be written is not to slow the next.
    assert get_kv_transfer_group().flush(60)
    get_kv_transfer_group()._stopped = stopped


def first_tokens(given: argparse.Namespace, dtype: str, folder: str, seeds: Sequence[int]) -> float:
    """The median of some prompts, in seconds, in a new engine."""
    llm = _engine(given, dtype, folder)
    # The first prompt, too short for a block, warms up.
    _first_token(llm, 15, 0)
    is_restored = len(set(seeds)) < len(seeds)
    seconds = [_first_token(llm, given.context, seed, is_restored) for seed in seeds]
    # What is still to be written is written.
    llm.llm_engine.engine_core.shutdown()
    return statistics.median(seconds)


def _engine(given: argparse.Namespace, dtype: str, folder: str) -> "LLM":
    from vllm import LLM

    connector, key = STORES[dtype]
    return LLM(
        given.model,
        dtype=given.dtype,
        kv_cache_dtype=dtype,
        enforce_eager=True,
        max_model_len=given.context + 8,
        # ExampleConnector stores prompts that are computed in one step.
        max_num_batched_tokens=given.context,
        kv_cache_memory_bytes=1 << 30,
        additional_config={"antkv": {"codebooks": given.codebooks}},
        kv_transfer_config={
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {key: folder},
        },
    )


def _first_token(llm: "LLM", num_tokens: int, seed: int, is_restored: bool = False) -> float:
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [(7 * position + seed) % 4000 + 3 for position in range(num_tokens)]}
    start = time.perf_counter()
    (answer,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    seconds = time.perf_counter() - start
    assert bool(answer.num_cached_tokens) == is_restored
    assert llm.reset_prefix_cache()
    return seconds


if __name__ == "__main__":
    main()
