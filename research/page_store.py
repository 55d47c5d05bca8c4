"""Seconds to the first token of a prompt: computed, and restored from a folder by an engine that has just started.

python -m research.page_store MODEL --codebooks DIR

Pages of antkv go through `AntKVStore`, those of `auto` through vLLM's ExampleConnector. What is restored is in memory.
Prompts are computed with the folder, where they are looked for and kept, and without, one after the other.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

STORES = {"antkv-1bit": ("AntKVStore", "folder"), "auto": ("ExampleConnector", "shared_storage_path")}


#: Prompts that are computed, and how often one is restored.
TIMES = 5


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
            without = first_tokens(given, dtype, None, range(TIMES))
            computed = first_tokens(given, dtype, folder, range(TIMES))
            num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            restored = first_tokens(given, dtype, folder, [0] * TIMES)
        a_token = f"{num_bytes / given.context / TIMES:,.0f} bytes a token"
        times = f"computed {computed:.2f} s (without a folder {without:.2f} s), restored {restored:.2f} s"
        print(f"{dtype}: {times}, {a_token}", flush=True)


def first_tokens(given: argparse.Namespace, dtype: str, folder: str | None, seeds: Sequence[int]) -> float:
    """The median of some prompts, in seconds, in a new engine."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as fresh:
        return fresh.submit(_first_tokens, given, dtype, folder, seeds).result()


def _first_tokens(given: argparse.Namespace, dtype: str, folder: str | None, seeds: Sequence[int]) -> float:
    from vllm import LLM, SamplingParams

    connector, key = STORES[dtype]
    store = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": {key: folder}}
    llm = LLM(
        given.model,
        dtype=given.dtype,
        kv_cache_dtype=dtype,
        enforce_eager=True,
        max_model_len=given.context + 8,
        # ExampleConnector stores prompts that are computed in one step.
        max_num_batched_tokens=given.context,
        kv_cache_memory_bytes=1 << 30,
        additional_config={"antkv": {"codebooks": given.codebooks}},
        kv_transfer_config=store if folder else None,
    )
    seconds = []
    # The first prompt, too short for a block, warms up.
    for number, num_tokens in [(0, 15), *((seed, given.context) for seed in seeds)]:
        prompt = {"prompt_token_ids": [(7 * position + number) % 4000 + 3 for position in range(num_tokens)]}
        start = time.perf_counter()
        (answer,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        assert llm.reset_prefix_cache()
    assert bool(answer.num_cached_tokens) == (len(set(seeds)) < len(seeds))
    # What is still to be written is written.
    llm.llm_engine.engine_core.shutdown()
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
