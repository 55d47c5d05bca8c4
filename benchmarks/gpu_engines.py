"""What whole vLLM engines give on this GPU: time to first token, output tokens per second, and the largest batch.

An engine for each cache starts, all at once, with random weights of a Llama-3-8B and a codebook as calibration makes
it. Then they are measured in turn while the others wait. The JSON is written after every figure.

    python -m benchmarks.gpu_engines                          # about five minutes, 75 GiB
    python -m benchmarks.gpu_engines --sides antkv-1bit       # 24 GiB
    python -m benchmarks.gpu_engines --model models/embedded --sides auto antkv-1bit --contexts 512   # on a CPU, too
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.gpu.tables import engines_table
from benchmarks.remote import Remote

#: Values of --kv-cache-dtype; after a slash, of our setting `kernels`.
SIDES = ("auto", "fp8", "antkv-1bit")
#: Tokens of an output, the last ones of a request.
OUTPUT = 64
#: Tokens of all requests of a batch: 64 of 1,024, 16 of 8,192, 4 of 32,768.
BATCHES = {1024: 64, 8192: 16, 32_768: 4}
#: Beyond this many requests at a time, the model's own matrices are what takes the time.
MAX_BATCH = 1024
#: Share of the cache that the largest batch fills: requests that preempt each other would measure something else.
FILLED = 0.95
_PROMPTS = 5
_START_SECONDS = 400


def main() -> int:
    """Measure, write the JSON, print the table."""
    arguments = _arguments()
    from benchmarks.gpu.device import described, require_gpu, write_report
    from benchmarks.gpu.llama import make_model

    rows: dict[str, dict[str, Any]] = {side: {"side": side} for side in arguments.sides}
    report = {"kv_gib": arguments.kv_gib, "output": OUTPUT, "rows": list(rows.values())}
    with ExitStack() as held:
        if arguments.model is None:
            require_gpu()
            presets = sorted({side.partition("/")[0] for side in arguments.sides if side.startswith("antkv-")})
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            arguments.model = make_model(folder, presets, max(arguments.contexts))
        engines = {
            side: held.enter_context(closing(Remote(_Measurements, arguments, side))) for side in arguments.sides
        }
        for side, name, value in measured(engines, arguments.contexts):
            print(f"{side}: {name} {value}", file=sys.stderr, flush=True)
            rows[side][name] = value
            write_report(arguments.json, report)
    print(described(), engines_table(report), sep="\n\n")
    return int(any("error" in row for row in rows.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), help=f"default: {', '.join(SIDES)}")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(BATCHES), help="tokens of a request in the end")
    parser.add_argument("--kv-gib", type=float, default=8, help="KV memory of every side (default: 8)")
    parser.add_argument("--model", type=Path, help="another one; its weights are not read")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    return parser.parse_args()


def measured(engines: dict[str, Remote], contexts: list[int]) -> Iterator[tuple[str, str, Any]]:
    """(side, name, figure), what matters most first; a side that fails says why and is left alone."""
    orders: list[tuple[str, str, tuple[int, ...]]] = [("start_seconds", "start_seconds", ())]
    orders += [(f"first_token_{context}", "first_token", (context,)) for context in contexts]
    for context in contexts:
        orders.append((f"tokens_per_second_{context}", "tokens_per_second", (context, BATCHES.get(context, 8))))
    orders += [("largest", "largest", (min(contexts),)), ("profile", "profile", (min(contexts),))]
    for name, order, values in orders:
        for side, engine in list(engines.items()):
            try:
                answer = engine.call(order, *values, seconds=_START_SECONDS)
            except (RuntimeError, TimeoutError) as error:
                del engines[side]
                yield side, "error", f"{name}: {type(error).__name__}: {error}"
            else:
                yield side, name, answer


class _Measurements:
    """Of an engine in this process."""

    def __init__(self, arguments: argparse.Namespace, side: str) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        begin = time.perf_counter()
        from vllm import LLM

        kv_cache_dtype, _, kernels = side.partition("/")
        self._llm = LLM(
            str(arguments.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_dtype=kv_cache_dtype,
            additional_config={"antkv": {"kernels": kernels}} if kernels else {},
            kv_cache_memory_bytes=int(arguments.kv_gib * 2**30),
            max_model_len=max(arguments.contexts),
            max_num_seqs=MAX_BATCH,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            seed=0,
        )
        self._vocab_size = self._llm.model_config.get_vocab_size()
        self._seconds(1, 64, 8)
        self._started = time.perf_counter() - begin

    def start_seconds(self) -> float:
        """Until it has answered."""
        return self._started

    def first_token(self, context: int) -> float:
        """Seconds, the median of several prompts, one at a time."""
        return statistics.median(self._seconds(1, context - OUTPUT, 1) for _ in range(_PROMPTS))

    def tokens_per_second(self, context: int, batch: int) -> float:
        """Output tokens, without the time of the prompts."""
        prompts = self._seconds(batch, context - OUTPUT, 1)
        return batch * (OUTPUT - 1) / (self._seconds(batch, context - OUTPUT, OUTPUT) - prompts)

    def largest(self, context: int) -> dict[str, float]:
        """Tokens that fit, requests of `context` tokens among them, and their output tokens per second."""
        from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

        engine = self._llm.llm_engine
        kv_cache_config = engine.engine_core.engine_core.scheduler.kv_cache_config
        capacity = int(get_kv_cache_capacity(engine.vllm_config, kv_cache_config)[0])
        batch = min(int(FILLED * capacity) // context, MAX_BATCH)
        return {"capacity": capacity, "batch": batch, "tokens_per_second": self.tokens_per_second(context, batch)}

    def profile(self, context: int) -> dict[str, str]:
        """The operators and kernels of a prompt, of decode steps, and of both at once, that took longest."""
        from torch.profiler import ProfilerActivity, profile, supported_activities

        activities = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        sort_by = f"self_{'cuda' if len(activities) > 1 else 'cpu'}_time_total"

        def table(run: Callable[[], object]) -> str:
            with profile(activities=activities) as profiler:
                run()
            return str(profiler.key_averages().table(sort_by=sort_by, row_limit=30, max_name_column_width=80))

        return {
            "prompt": table(lambda: self._seconds(1, context - OUTPUT, 1)),
            "decode": table(lambda: self._seconds(32, 16, OUTPUT)),
            "mixed": table(lambda: self._seconds(32, context - OUTPUT, 8)),
        }

    def _seconds(self, batch: int, prompt: int, output: int) -> float:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0, detokenize=False)
        prompts = [
            {"prompt_token_ids": [(7 * position + 131 * request) % self._vocab_size for position in range(prompt)]}
            for request in range(batch)
        ]
        begin = time.perf_counter()
        self._llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
