"""An engine of real vLLM in a process of its own, told what to do step by step, so that several can take turns."""

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CHUNK = 4096


@dataclass(frozen=True)
class Setting:
    """`batch` requests of `context` tokens."""

    context: int
    batch: int


class EngineProcess:
    """The process, from outside.

    Args:
        model: its folder.
        dtype: of the KV cache.
        options: more arguments of vLLM's `LLM`.
        checkout: a folder with the package, instead of the installed one.

    Raises:
        SystemExit: it ended; what it said stands above.
    """

    def __init__(self, model: Path, dtype: str, options: dict[str, Any], checkout: Path | None = None) -> None:
        self.dtype = dtype
        os.environ |= {
            "OMP_NUM_THREADS": str(os.cpu_count()),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "3",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        spawn = multiprocessing.get_context("spawn")
        self._connection, there = spawn.Pipe()
        spawn.Process(target=_serve, args=(there, str(model), dtype, options, checkout), daemon=True).start()
        there.close()
        self._answer()

    def prefill(self, setting: Setting, steps: int) -> float:
        """Begin the requests of a setting, which are good for so many decode steps: seconds until all are decoding."""
        return self._call("prefill", setting, steps)

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of the next steps."""
        return self._call("decode", steps)

    def finish(self) -> None:
        """End the requests."""
        self._call("finish")

    def _call(self, *message: Any) -> Any:
        self._connection.send(message)
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise SystemExit(f"The engine with --kv-cache-dtype {self.dtype} ended.") from None


def _serve(connection: Connection, model: str, dtype: str, options: dict[str, Any], checkout: Path | None) -> None:
    """Do what is asked until nobody asks any more."""
    if checkout:
        # Of this process, and of those that it starts.
        sys.path.insert(0, str(checkout))
        os.environ["PYTHONPATH"] = str(checkout)
    # vLLM's messages are not to come between the lines of a table.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine = _Engine(model, dtype, options)
    connection.send(None)
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(engine, name)(*arguments))


class _Engine:
    """The engine, inside its process; operations as in `EngineProcess`."""

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
        return [self._step() for _ in range(steps)]

    def finish(self) -> None:
        self._engine.abort_request(self._requests)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _step(self) -> float:
        start = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - start
