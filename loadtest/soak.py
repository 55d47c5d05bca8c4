"""Minutes of mixed load with aborts and disconnects: `python -m loadtest.soak --minutes 20`.

Starts a server (unknown arguments go to `vllm serve`), writes a JSON report, and exits with 1 unless

- every request gets a correct answer;
- a fixed probe prompt gets the same greedy answer throughout;
- memory stays flat;
- at the end no request is left and all KV blocks are free.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from openai import AsyncOpenAI, AsyncStream, OpenAIError
from pydantic import BaseModel

from loadtest.api import chat, client_options, completion, prose_for, served_model
from loadtest.server import EMBEDDED, Server, ServerError, running_server
from loadtest.stream import StreamError, StreamReader
from loadtest.watch import memory, slope, wait_until_idle

_USERS = 4
_ACTIONS = {"complete": 5, "chat": 3, "abort": 3, "disconnect": 2}
_PROMPT_TOKENS = (8, 500)
_OUTPUT_TOKENS = (4, 80)
_PROBE_TOKENS = (180, 40)
_PROBE_SECONDS = 5.0
#: Share of a run that fills caches and allocator pools; the slope is that of the rest.
_WARM_UP = 0.5
#: Limits growth that would hide a leak on a CPU. oneDNN caches the kernels of the last 1024 GEMM shapes: half a GiB
#: over many minutes. glibc raises its mmap threshold to the largest tensor freed so far and then keeps freed tensors in
#: fragmented heaps: steps of tens of MiB, up and down.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "MALLOC_MMAP_THRESHOLD_": "131072"}
_IDLE_SECONDS = 60


class Report(BaseModel, frozen=True):
    """Results of a soak test.

    requests: by action.
    answers: how often each answer to the probe came; exactly one is right.
    held_at_end: metrics that should be 0 and are not.
    """

    requests: dict[str, int]
    errors: list[str]
    answers: dict[str, int]
    memory_slope_mib_per_minute: float
    held_at_end: dict[str, float]

    def complaints(self, max_slope: float) -> list[str]:
        """A sentence for each failed check."""
        checks = {
            f"{len(self.errors)} requests went wrong.": bool(self.errors),
            f"The probe got {len(self.answers)} different answers.": len(self.answers) != 1,
            f"Memory grew by {self.memory_slope_mib_per_minute:.2f} MiB per minute.": (
                self.memory_slope_mib_per_minute > max_slope
            ),
            f"Still held at the end: {self.held_at_end}.": bool(self.held_at_end),
        }
        return [text for text, wrong in checks.items() if wrong]


class _Load:
    """Users, a probe, and what was observed."""

    def __init__(self, server: Server, seconds: float) -> None:
        self.server = server
        self.model = served_model(server.url)
        self.prose = prose_for(server.url, self.model)
        # Half of the prompts share a beginning, for the prefix cache.
        self.beginnings = [self.prose.write(130, random.Random(number)) for number in range(4)]
        self.end = time.monotonic() + seconds
        self.requests: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.errors: list[str] = []
        self.memory: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Until the end, and until running requests have finished."""
        async with AsyncOpenAI(**client_options(self.server.url)) as client:
            users = (self._user(client, random.Random(number)) for number in range(_USERS))
            await asyncio.gather(*users, self._probe(client), self._watch_memory())

    def _running(self) -> bool:
        # Load a slow server until every action has been tried.
        return time.monotonic() < self.end or self.requests.keys() != _ACTIONS.keys()

    async def _user(self, client: AsyncOpenAI, rng: random.Random) -> None:
        while self._running():
            (action,) = rng.choices(list(_ACTIONS), weights=list(_ACTIONS.values()))
            try:
                await self._act(client, action, rng)
            except (StreamError, OpenAIError, ValueError) as error:
                self.errors.append(f"{action}: {error!r}")
            self.requests[action] += 1

    async def _act(self, client: AsyncOpenAI, action: str, rng: random.Random) -> None:
        text = self.prose.write(rng.randint(*_PROMPT_TOKENS), rng)
        if rng.random() < 0.5:
            text = f"{rng.choice(self.beginnings)} {text}"
        max_tokens = rng.randint(*_OUTPUT_TOKENS)
        request = completion(self.model, text, max_tokens)
        if action == "chat":
            request = chat(self.model, [{"role": "user", "content": text}], max_tokens)
        # A disconnect usually comes while the prompt waits or is being computed.
        patience = rng.uniform(0, 0.3) if action == "disconnect" else None
        chunks_wanted = rng.randint(1, max_tokens) if action == "abort" else None
        reader = StreamReader(time.perf_counter())
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(patience),
                await client.post(
                    request.path, cast_to=object, body=request.body, stream=True, stream_cls=AsyncStream[object]
                ) as chunks,
            ):
                number = 0
                async for chunk in chunks:
                    reader.feed(chunk, time.perf_counter())
                    number += 1
                    if number == chunks_wanted:
                        return
            reader.finish(time.perf_counter(), request.max_tokens)

    async def _probe(self, client: AsyncOpenAI) -> None:
        """The same greedy request again and again, amid all others."""
        prompt = self.prose.write(_PROBE_TOKENS[0], random.Random("probe"))
        while self._running():
            try:
                answer = await client.completions.create(
                    model=self.model, prompt=prompt, max_tokens=_PROBE_TOKENS[1], temperature=0
                )
                self.answers[answer.choices[0].text] += 1
            except OpenAIError as error:
                self.errors.append(f"probe: {error!r}")
            await asyncio.sleep(_PROBE_SECONDS)

    async def _watch_memory(self) -> None:
        while self._running():
            used = await asyncio.to_thread(memory, self.server.pid)
            self.memory.append((time.monotonic(), sum(used.values())))
            await asyncio.sleep(1)


def soak(server: Server, minutes: float) -> Report:
    """Load a running server and report on it."""
    load = _Load(server, 60 * minutes)
    asyncio.run(load.run())
    warm = load.memory[int(_WARM_UP * len(load.memory)) :]
    return Report(
        requests=dict(load.requests),
        errors=load.errors,
        answers=dict(load.answers),
        memory_slope_mib_per_minute=slope([at for at, _ in warm], [used for _, used in warm]),
        held_at_end=wait_until_idle(server.url, _IDLE_SECONDS),
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=20, help="how long the load lasts (default: 20)")
    parser.add_argument("--model", default=str(EMBEDDED), help="model to serve (default: the embedded one)")
    parser.add_argument("--kv-cache-dtype", default="antkv-1bit", help="auto or a preset (default: antkv-1bit)")
    parser.add_argument("--max-slope", type=float, default=2.0, help="MiB per minute that still count as flat")
    parser.add_argument("--out", type=Path, default=Path("loadtest-results/soak.json"), help="the report")
    options, vllm = parser.parse_known_args()
    if options.kv_cache_dtype.startswith("antkv-"):
        # Else an answer depends on what is in the prefix cache. Of two, vLLM takes the last.
        vllm = ["--additional-config", '{"antkv": {"prefill_reads_cache": true}}', *vllm]
    log = options.out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with running_server(options.model, options.kv_cache_dtype, log, vllm, ENVIRONMENT) as server:
            report = soak(server, options.minutes)
    except ServerError as error:
        sys.exit(str(error))
    options.out.write_text(report.model_dump_json(indent=2) + "\n")
    complaints = report.complaints(options.max_slope)
    print(options.out.read_text(), *complaints, sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
