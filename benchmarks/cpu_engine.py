"""An engine of real vLLM that is told what to do step by step."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK = 4096
#: Of the processes that engines run in.
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "3",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Setting:
    """`batch` requests of `context` tokens."""

    context: int
    batch: int


def start(model: Path, dtype: str, options: dict[str, Any], checkout: Path | None) -> "Engine":
    """An engine in this process, which is its own.

    Args:
        model: its folder.
        dtype: of the KV cache.
        options: more arguments of vLLM's `LLM`.
        checkout: a folder with the package, instead of the installed one.
    """
    if checkout:
        # Of this process, and of those that it starts.
        sys.path.insert(0, str(checkout))
        os.environ["PYTHONPATH"] = str(checkout)
    # vLLM's messages are not to come between the lines of a table.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return Engine(str(model), dtype, options)


class Engine:
    """See `start`."""

    def __init__(self, model: str, dtype: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._engine: Any = LLM(
            model,
            skip_tokenizer_init=True,
            kv_cache_dtype=dtype,
            max_num_batched_tokens=_CHUNK,
            enable_prefix_caching=False,
            enforce_eager=True,
            seed=0,
            **options,
        ).llm_engine
        self._requests: list[str] = []

    def prefill(self, setting: Setting, steps: int) -> float:
        """Begin the requests of a setting, which are good for so many decode steps: seconds until all are decoding."""
        from vllm import SamplingParams

        # The batch must be complete before anybody finishes: with chunked prefill, the first ones decode meanwhile.
        waiting = setting.batch * (setting.context // _CHUNK + 2)
        parameters = SamplingParams(max_tokens=waiting + steps, ignore_eos=True, temperature=0, detokenize=False)
        self._requests = [f"{setting}-{index}" for index in range(setting.batch)]
        for index, name in enumerate(self._requests):
            tokens = [(7 * position + 13 * index) % 4000 + 3 for position in range(setting.context)]
            self._engine.add_request(name, {"prompt_token_ids": tokens}, parameters)
        scheduler = self._engine.engine_core.engine_core.scheduler
        seconds = 0.0
        while scheduler.waiting or any(request.num_output_tokens < 1 for request in scheduler.running):
            seconds += self._step()
        return seconds

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of the next steps."""
        return [self._step() for _ in range(steps)]

    def finish(self) -> None:
        """End the requests."""
        self._engine.abort_request(self._requests)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _step(self) -> float:
        start = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - start
