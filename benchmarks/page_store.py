"""Seconds to the first token of a prompt: computed, and restored from a folder by an engine that has just started.

python -m benchmarks.page_store MODEL --codebooks DIR

Pages of antkv go through `AntKVStore`, those of `auto` through vLLM's ExampleConnector. What is restored is in memory.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

STORES = {"antkv-1bit": ("AntKVStore", "folder"), "auto": ("ExampleConnector", "shared_storage_path")}


def main() -> None:
    """Print a line for each cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--codebooks", help="folder; default: where the server looks")
    # ExampleConnector looks for one token less than it stores: not at the edge of a block.
    parser.add_argument("--context", type=int, default=8066, help="tokens of the prompt")
    given = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    spawn = multiprocessing.get_context("spawn")
    for dtype in STORES:
        with tempfile.TemporaryDirectory() as folder:
            with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as fresh:
                computed = fresh.submit(first_token_seconds, given, dtype, folder, is_stored=False).result()
                restored = fresh.submit(first_token_seconds, given, dtype, folder, is_stored=True).result()
            num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        a_token = f"{num_bytes / given.context:,.0f} bytes a token"
        print(f"{dtype}: computed {computed:.2f} s, restored {restored:.2f} s, {a_token}", flush=True)


def first_token_seconds(given: argparse.Namespace, dtype: str, folder: str, is_stored: bool) -> float:
    """In a new engine: of the first time, or the median of five where the prompt `is_stored`."""
    from vllm import LLM, SamplingParams

    connector, key = STORES[dtype]
    store = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": {key: folder}}
    llm = LLM(
        given.model,
        dtype="float32",
        kv_cache_dtype=dtype,
        enforce_eager=True,
        max_model_len=given.context + 8,
        # ExampleConnector stores prompts that are computed in one step.
        max_num_batched_tokens=given.context,
        kv_cache_memory_bytes=1 << 30,
        additional_config={"antkv": {"codebooks": given.codebooks}},
        kv_transfer_config=store,
    )
    seconds = []
    # The first prompt, too short for a block, warms up.
    for num_tokens in [15] + [given.context] * (5 if is_stored else 1):
        prompt = {"prompt_token_ids": [(7 * position) % 4000 + 3 for position in range(num_tokens)]}
        start = time.perf_counter()
        (answer,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        assert llm.reset_prefix_cache()
    assert bool(answer.num_cached_tokens) == is_stored
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
