"""Tokens per second with and without drafts (`ngram`), and the share of drafts that is accepted.

python -m research.drafts MODEL --text FILE --dtype float32

Prompts are cut from the text at equal distances and answered greedily, one request at a time. An engine of its own in
a process of its own answers for each cache, with drafts and without.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

#: Tokens of a prompt and of its answer.
CONTEXT, ANSWER, NUM_PROMPTS = 512, 96, 8


def main() -> None:
    """Print a row for each cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="Prompts are cut from this file.")
    parser.add_argument("--kv-cache-dtypes", nargs="+", default=["auto", "antkv-1bit"])
    parser.add_argument("--dtype", default="auto", help="Of weights and activations: float32 or bfloat16.")
    parser.add_argument("--drafts", type=int, default=3, help="Tokens that are drafted in a step.")
    given = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    print("| cache | accepted | tokens/s without | with | ratio |\n|---|---:|---:|---:|---:|", flush=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as fresh:
        for dtype in given.kv_cache_dtypes:
            plain, _ = fresh.submit(answer, given, dtype, 0).result()
            speed, accepted = fresh.submit(answer, given, dtype, given.drafts).result()
            print(f"| {dtype} | {accepted:.1%} | {plain:.1f} | {speed:.1f} | {speed / plain:.2f} |", flush=True)


def answer(given: argparse.Namespace, kv_cache_dtype: str, num_drafts: int) -> tuple[float, float]:
    """Of a new engine: tokens per second after the prompt, the median over prompts, and the share of drafts taken."""
    from vllm import LLM

    speculation = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": 3}
    llm = LLM(
        given.model,
        dtype=given.dtype,
        kv_cache_dtype=kv_cache_dtype,
        enforce_eager=True,
        max_model_len=CONTEXT + ANSWER,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,
        speculative_config=speculation if num_drafts else None,
    )
    ids = llm.get_tokenizer().encode(given.text.read_text())
    tokens_per_second(llm, ids[:CONTEXT])
    warm = counters(llm)
    starts = [index * (len(ids) - CONTEXT) // NUM_PROMPTS for index in range(NUM_PROMPTS)]
    speeds = [tokens_per_second(llm, ids[start : start + CONTEXT]) for start in starts]
    counted = counters(llm) - warm
    accepted, drafted = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    return statistics.median(speeds), accepted / max(1, drafted)


def tokens_per_second(llm: Any, prompt: list[int]) -> float:
    """Of a greedy answer to one request, without the step that computes the prompt and its token."""
    from vllm import SamplingParams

    engine, num_tokens = llm.llm_engine, 0
    parameters = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    engine.add_request(str(time.monotonic_ns()), {"prompt_token_ids": prompt}, parameters)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if outputs and not num_tokens:
            start, num_tokens = time.perf_counter(), len(outputs[0].outputs[0].token_ids)
    return (ANSWER - num_tokens) / (time.perf_counter() - start)


def counters(llm: Any) -> Counter[str]:
    """What vLLM counts of drafts."""
    metrics = (metric for metric in llm.get_metrics() if metric.name.startswith("vllm:spec_decode_num_"))
    return Counter({metric.name: metric.value for metric in metrics if hasattr(metric, "value")})


if __name__ == "__main__":
    main()
