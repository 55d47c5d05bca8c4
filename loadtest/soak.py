"""Minutes of mixed load with aborts, disconnects and oversize prompts: `python -m loadtest.soak --minutes 20`.

Starts a server (unknown arguments go to `vllm serve`) and checks:

- every request gets a correct answer, and every oversize prompt an HTTP 400;
- a fixed probe prompt gets the same greedy answer throughout;
- memory stays flat;
- at the end no request is left and all KV blocks are free.

Writes a JSON report; the exit code is 0 if all of this held, else 1.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from loadtest.api import Request, chat, completion, headers, prose_for, served_model
from loadtest.prose import Prose
from loadtest.server import EMBEDDED, Server, ServerError, running_server
from loadtest.stream import StreamError, StreamReader
from loadtest.watch import memory, metrics, slope, wait_until_idle

_USERS = 4
_ACTIONS = {"complete": 5, "chat": 3, "abort": 3, "disconnect": 2, "oversize": 1}
_PROMPT_TOKENS = (8, 500)
_OUTPUT_TOKENS = (4, 80)
_PROBE_TOKENS = (180, 40)
_PROBE_SECONDS = 5.0
_SAMPLE_SECONDS = 1.0
#: Share of a run that fills caches and allocator pools; the slope is that of the rest.
_WARM_UP = 0.5
#: Limits growth that would hide a leak on a CPU. oneDNN caches the kernels of the last 1024 GEMM shapes: half a GiB
#: over many minutes. glibc raises its mmap threshold to the largest tensor freed so far and then keeps freed tensors in
#: fragmented heaps: steps of tens of MiB, up and down.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "MALLOC_MMAP_THRESHOLD_": "131072"}
_IDLE_SECONDS = 60
_TIMEOUT = 300.0
_KEPT_ERRORS = 20


class Report(BaseModel):
    """Results of a soak test.

    requests: by action.
    held_at_end: metrics that should be 0 and are not.
    answers: how often each answer to the probe came; exactly one is right.
    memory_mib: of each process, in ten samples evenly spread over the run, warming up included.
    """

    model_config = ConfigDict(frozen=True)

    kv_cache_dtype: str
    minutes: float
    requests: dict[str, int]
    generated_tokens: int
    preemptions: int
    errors: int
    first_errors: list[str]
    answers: dict[str, int]
    memory_mib: dict[str, list[float]]
    memory_slope_mib_per_minute: float
    max_slope_mib_per_minute: float
    held_at_end: dict[str, float]
    complaints: list[str] = Field(default_factory=list)

    def judged(self) -> "Report":
        """With a sentence for each failed check."""
        checks = {
            f"{self.errors} requests went wrong.": self.errors > 0,
            f"The probe got {len(self.answers)} different answers.": len(self.answers) != 1,
            f"Memory grew by {self.memory_slope_mib_per_minute:.2f} MiB per minute.": (
                self.memory_slope_mib_per_minute > self.max_slope_mib_per_minute
            ),
            f"Still held at the end: {self.held_at_end}.": bool(self.held_at_end),
        }
        return self.model_copy(update={"complaints": [text for text, wrong in checks.items() if wrong]})


class Soak:
    """The load, and what was observed."""

    def __init__(self, server: Server, max_model_len: int, seed: int = 0) -> None:
        self._server = server
        self._model = served_model(server.url)
        self._prose: Prose = prose_for(server.url, self._model)
        self._max_model_len = max_model_len
        self._rng = random.Random(seed)
        self._beginnings = [self._prose.write(130, self._rng) for _ in range(4)]
        self.requests: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.errors: list[str] = []
        self.memory: list[tuple[float, dict[str, float]]] = []

    async def run(self, seconds: float) -> None:
        """Load the server for at least `seconds`, then let running requests finish."""
        self._end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=2 * _USERS)
        async with httpx.AsyncClient(
            base_url=self._server.url, headers=headers(), timeout=_TIMEOUT, limits=limits
        ) as client:
            users = (self._user(client, random.Random(self._rng.random())) for _ in range(_USERS))
            await asyncio.gather(*users, self._probe(client), self._watch_memory())

    def _running(self) -> bool:
        # Load a slow server until every action has been tried.
        return time.monotonic() < self._end or self.requests.keys() != _ACTIONS.keys()

    async def _user(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        actions = {
            "complete": self._answered,
            "chat": self._answered,
            "abort": self._aborted,
            "disconnect": self._disconnected,
            "oversize": self._refused,
        }
        while self._running():
            (action,) = rng.choices(list(_ACTIONS), weights=list(_ACTIONS.values()))
            try:
                await actions[action](client, self._request(action, rng), rng)
            except (StreamError, httpx.HTTPError) as error:
                self.errors.append(f"{action}: {error!r}")
            self.requests[action] += 1

    def _request(self, action: str, rng: random.Random) -> Request:
        if action == "oversize":
            # Far over the limit: the estimate of tokens per word does not matter.
            return completion(self._model, self._prose.write(2 * self._max_model_len, rng), 16)
        text = self._prose.write(rng.randint(*_PROMPT_TOKENS), rng)
        if rng.random() < 0.5:
            text = f"{rng.choice(self._beginnings)} {text}"
        max_tokens = rng.randint(*_OUTPUT_TOKENS)
        if action == "complete":
            return completion(self._model, text, max_tokens)
        return chat(self._model, [{"role": "user", "content": text}], max_tokens)

    async def _answered(self, client: httpx.AsyncClient, request: Request, _: random.Random) -> None:
        """Read to the end."""
        reader = StreamReader(time.perf_counter())
        async with client.stream("POST", request.path, json=request.body) as response:
            await _must_be(response, httpx.codes.OK)
            async for line in response.aiter_lines():
                reader.feed(line, time.perf_counter())
        reader.finish(time.perf_counter(), request.max_tokens)

    async def _aborted(self, client: httpx.AsyncClient, request: Request, rng: random.Random) -> None:
        """Close the connection in the middle of the answer."""
        lines_wanted = rng.randint(1, request.max_tokens)
        async with client.stream("POST", request.path, json=request.body) as response:
            await _must_be(response, httpx.codes.OK)
            async for line in response.aiter_lines():
                lines_wanted -= bool(line)
                if not lines_wanted:
                    return

    async def _disconnected(self, client: httpx.AsyncClient, request: Request, rng: random.Random) -> None:
        """Disconnect early, usually while the prompt waits or is being computed."""
        try:
            async with asyncio.timeout(rng.uniform(0, 0.3)):
                await self._answered(client, request, rng)
        except TimeoutError:
            return

    async def _refused(self, client: httpx.AsyncClient, request: Request, _: random.Random) -> None:
        """A prompt over the model's length."""
        async with client.stream("POST", request.path, json=request.body) as response:
            await _must_be(response, httpx.codes.BAD_REQUEST)

    async def _probe(self, client: httpx.AsyncClient) -> None:
        """The same greedy request again and again, amid all others."""
        prompt = self._prose.write(_PROBE_TOKENS[0], random.Random("probe"))
        body = {"model": self._model, "prompt": prompt, "max_tokens": _PROBE_TOKENS[1], "temperature": 0}
        while self._running():
            try:
                response = await client.post("/v1/completions", json=body)
                self.answers[response.raise_for_status().json()["choices"][0]["text"]] += 1
            except httpx.HTTPError as error:
                self.errors.append(f"probe: {error!r}")
            await asyncio.sleep(_PROBE_SECONDS)

    async def _watch_memory(self) -> None:
        begin = time.monotonic()
        while self._running():
            used = await asyncio.to_thread(memory, self._server.pid)
            self.memory.append((time.monotonic() - begin, used))
            await asyncio.sleep(_SAMPLE_SECONDS)


def soak(server: Server, kv_cache_dtype: str, minutes: float, max_model_len: int, max_slope: float) -> Report:
    """Load a running server and report on it."""
    load, before = Soak(server, max_model_len), metrics(server.url)
    asyncio.run(load.run(60 * minutes))
    held = wait_until_idle(server.url, _IDLE_SECONDS)
    after = metrics(server.url)
    warm = load.memory[int(_WARM_UP * len(load.memory)) :]
    report = Report(
        kv_cache_dtype=kv_cache_dtype,
        minutes=minutes,
        requests=dict(load.requests),
        generated_tokens=_grown("vllm:generation_tokens_total", before, after),
        preemptions=_grown("vllm:num_preemptions_total", before, after),
        errors=len(load.errors),
        first_errors=load.errors[:_KEPT_ERRORS],
        answers=dict(load.answers),
        memory_mib=_tenths([used for _, used in load.memory]),
        memory_slope_mib_per_minute=slope([at for at, _ in warm], [sum(used.values()) for _, used in warm]),
        max_slope_mib_per_minute=max_slope,
        held_at_end=held,
    )
    return report.judged()


def _grown(name: str, before: dict[str, float], after: dict[str, float]) -> int:
    """Growth of a counter since `before`: the server may have answered other requests earlier."""
    return int(after[name] - before.get(name, 0.0))


def _tenths(samples: list[dict[str, float]]) -> dict[str, list[float]]:
    picked = [samples[i * (len(samples) - 1) // 9] for i in range(10)]
    return {name: [round(sample.get(name, 0.0), 1) for sample in picked] for name in picked[0]}


async def _must_be(response: httpx.Response, status: int) -> None:
    if response.status_code != status:
        text = (await response.aread()).decode(errors="replace")
        raise StreamError(f"HTTP {response.status_code} instead of {status}: {text[:300]}.")


def main() -> int:
    """The command."""
    arguments, vllm = _arguments()
    options = ["--max-model-len", str(arguments.max_model_len), *vllm]
    log = arguments.out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with running_server(arguments.model, arguments.kv_cache_dtype, log, options, ENVIRONMENT) as server:
            dtype, minutes = arguments.kv_cache_dtype, arguments.minutes
            report = soak(server, dtype, minutes, arguments.max_model_len, arguments.max_slope)
    except ServerError as error:
        sys.exit(str(error))
    arguments.out.write_text(report.model_dump_json(indent=2) + "\n")
    Console().print_json(report.model_dump_json())
    return 1 if report.complaints else 0


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our arguments, and those of `vllm serve`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=20, help="how long the load lasts (default: 20)")
    parser.add_argument("--model", default=str(EMBEDDED), help="model to serve (default: the embedded one)")
    parser.add_argument("--kv-cache-dtype", default="antkv-1bit", help="auto or a preset (default: antkv-1bit)")
    parser.add_argument("--max-model-len", type=int, default=1024, help="768 or more (default: 1024)")
    parser.add_argument("--max-slope", type=float, default=2.0, help="MiB per minute that still count as flat")
    parser.add_argument("--out", type=Path, default=Path("loadtest-results/soak.json"), help="the report")
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
