"""Seconds to the first token of a prompt: computed, and restored from a folder by an engine that has just started.

python -m research.page_store MODEL --codebooks DIR

Pages of antkv go through `AntKVStore`, those of `auto` through vLLM's ExampleConnector. What is restored is in memory.
Each prompt is computed without the folder, and then with it, where it is looked for and kept, by two engines.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM

STORES = {"antkv-1bit": ("AntKVStore", "folder"), "auto": ("ExampleConnector", "shared_storage_path")}
#: Prompts that are computed, and how often one is restored.
TIMES = 5

#: Of a process that runs one.
engine: "LLM"


def main() -> None:
    """Print a line for each cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--codebooks", help="folder; default: where the server looks")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    # ExampleConnector looks for one token less than it stores: not at the edge of a block.
    parser.add_argument("--context", type=int, default=8066, help="tokens of the prompt")
    parser.add_argument("--caches", nargs="+", choices=STORES, default=list(STORES))
    given = parser.parse_args()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    for dtype in given.caches:
        with tempfile.TemporaryDirectory() as folder:
            with running(given, dtype, None) as without, running(given, dtype, folder) as store:
                pairs = [(without(seed), store(seed)) for seed in range(TIMES)]
            num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            with running(given, dtype, folder) as started:
                restored = [started(0, hit=True) for _ in range(TIMES)]
        plain, computed = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        cost = statistics.median(stored / alone for alone, stored in pairs) - 1
        times = f"computed {computed:.2f} s (without a folder {plain:.2f} s, {cost:+.1%})"
        a_token = f"{num_bytes / given.context / TIMES:,.0f} bytes a token"
        print(f"{dtype}: {times}, restored {statistics.median(restored):.2f} s, {a_token}", flush=True)


@contextmanager
def running(given: argparse.Namespace, dtype: str, folder: str | None) -> Iterator[Callable[..., float]]:
    """A new engine: seconds to the first token of the prompt of a seed."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_start, initargs=(given, dtype, folder)) as process:
        # Too short for a block, to warm up.
        process.submit(_first_token, 0, 15).result()
        yield lambda seed, hit=False: process.submit(_first_token, seed, given.context, hit).result()
        # What is still to be written is written.
        process.submit(_shut_down).result()


def _start(given: argparse.Namespace, dtype: str, folder: str | None) -> None:
    global engine
    from vllm import LLM

    connector, key = STORES[dtype]
    store = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": {key: folder}}
    engine = LLM(
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


def _first_token(seed: int, num_tokens: int, hit: bool = False) -> float:
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [(7 * position + seed) % 4000 + 3 for position in range(num_tokens)]}
    start = time.perf_counter()
    (answer,) = engine.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    seconds = time.perf_counter() - start
    assert bool(answer.num_cached_tokens) == hit
    assert engine.reset_prefix_cache()
    return seconds


def _shut_down() -> None:
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
