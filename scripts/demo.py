"""`make demo`: serve a model at 1 bit with the real vLLM, and ask it something, with `--kv-cache-dtype auto` beside it.

Leaves the server running until Ctrl-C; with `--once` it is stopped and the exit code says whether all went well.
"""

import argparse
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import FrameType

import httpx
from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.server import EMBEDDED, ServerError, Start, starting_server, tail
from scripts.real_models import MODELS, FetchError, fetch

PRESET = "antkv-1bit"
#: The same fixed memory on every machine, so that the two capacities can be compared.
KV_BYTES = 1 << 30
PROMPT = "It was a cold evening in November, and the old man"
QUESTION = "Tell me about the house by the sea."
#: Of a server that asks nobody for anything, whose log shows the stages below.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "VLLM_LOGGING_LEVEL": "INFO"}
#: The same for both caches: they choose alike as long as they predict alike.
SAMPLING = {"max_tokens": 80, "temperature": 0.6, "seed": 1}
#: Lines of the server's log that tell how far it is.
STAGES = (
    (r"non-default args", "vLLM imported, settings read"),
    (r"antkv codebook (.*)", "codebook found and checked"),
    (r"(antkv-\S+: .* effective at .*)", "bits per element computed"),
    (r"Initializing a V1 LLM engine", "engine process started"),
    (r"Loading weights took|Model loading took", "weights loaded"),
    (r"KV cache size: ([\d,]+ tokens)", "KV cache allocated"),
    (r"init engine .* took ([\d.]+ s)", "engine warmed up"),
    (r"Application startup complete", "server listening"),
)

console = Console(highlight=False)


class DemoError(Exception):
    """Something the demo needs did not work; one sentence."""


def main() -> int:
    arguments = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="antkv-demo-") as folder:
            return run(arguments, Path(folder))
    except (DemoError, ServerError, FetchError) as error:
        console.print(f"[bold red]The demo failed:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nStopped; the servers are gone.")
        return 130 if arguments.once else 0


def run(arguments: argparse.Namespace, logs: Path) -> int:
    """The whole demo; DemoError when a step fails."""
    model = str(fetch(arguments.model)) if arguments.model in MODELS else arguments.model
    name = Path(model).name
    with ExitStack() as baseline, _serving(model, arguments.kv_cache_dtype, arguments.port, logs) as server:
        servers = [server]
        if server.kv_cache_dtype != "auto":
            servers.append(baseline.enter_context(_serving(model, "auto", 0, logs)))
        for started in servers:
            wait_until_healthy(started)
        ask(PROMPT, complete, servers, name)
        ask(QUESTION, chat, servers, name)
        report(servers)
        baseline.close()
        if arguments.once:
            console.print("[green]All of it worked.[/] Stopping the server.")
            return 0
        console.print(
            f"\nThe server keeps running at [bold]{server.url}[/] until Ctrl-C. Try, in another terminal:\n\n"
            f"  curl {server.url}/v1/completions -H 'Content-Type: application/json' \\\n"
            f"""    -d '{{"model": "{name}", "prompt": "The sea was", "max_tokens": 60}}'\n""",
            soft_wrap=True,
        )
        if server.process.wait():
            raise DemoError(f"the server stopped by itself.\n{tail(server.log)}")
    return 0


def _serving(model: str, kv_cache_dtype: str, port: int, logs: Path) -> AbstractContextManager[Start]:
    """A server that starts when this is entered and ends with it. port: 0 for a free one."""
    # Compiling takes longer than a few answers of a small model, and needs a compiler.
    options = ["--enforce-eager", "--served-model-name", Path(model).name, "--kv-cache-memory-bytes", str(KV_BYTES)]
    command = ["vllm", "serve", model, "--kv-cache-dtype", kv_cache_dtype, *options]
    console.print(f"[bold]$[/] {' '.join(command)}", soft_wrap=True)
    return starting_server(model, kv_cache_dtype, logs / f"{kv_cache_dtype}.log", options, ENVIRONMENT, port)


def wait_until_healthy(server: Start) -> None:
    """Show the stages of the start until `/health` answers."""
    begin = time.monotonic()
    stages = list(STAGES)
    what = f"Starting vLLM with {server.kv_cache_dtype} ..."
    with console.status(what) as status:
        healthy = False
        while not healthy:
            healthy = server.is_healthy()
            elapsed = time.monotonic() - begin
            text = server.log.read_text(errors="replace")
            while reached := [stage for stage in stages if re.search(stage[0], text)]:
                stages.remove(reached[0])
                match = re.search(reached[0][0], text)
                detail = f": {match[1]}" if match and match.groups() else ""
                console.print(f"{elapsed:6.0f} s  {escape(reached[0][1] + detail)}", soft_wrap=True)
            status.update(f"{what} {elapsed:.0f} s" + (f", next: {stages[0][1]}" if stages else ""))
            time.sleep(0.5)
    console.print(f"{elapsed:6.0f} s  [green]{server.kv_cache_dtype} is healthy[/]")


def complete(client: OpenAI, model: str) -> Iterator[str]:
    """The pieces of a completion as they come."""
    for chunk in client.completions.create(model=model, prompt=PROMPT, stream=True, **SAMPLING):
        yield chunk.choices[0].text


def chat(client: OpenAI, model: str) -> Iterator[str]:
    """The pieces of a chat answer as they come."""
    messages = [{"role": "user", "content": QUESTION}]
    create = client.chat.completions.create
    for chunk in create(model=model, messages=messages, stream=True, extra_body={"min_tokens": 8}, **SAMPLING):
        yield chunk.choices[0].delta.content or ""


def ask(prompt: str, answer: Callable[[OpenAI, str], Iterator[str]], servers: list[Start], model: str) -> None:
    """Print what each server answers, as it comes."""
    console.print(f"\n[bold]{prompt}[/]")
    for server in servers:
        console.print(f"[dim]{server.kv_cache_dtype}:[/] ", end="")
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        length = 0
        try:
            for text in answer(client, model):
                length += len(text)
                console.print(text, end="", markup=False, soft_wrap=True)
        except OpenAIError as error:
            raise DemoError(f"the server did not answer ({error}).\n{tail(server.log)}") from None
        console.print()
        if not length:
            raise DemoError(f"the answer of {server.kv_cache_dtype} is empty.")


def report(servers: list[Start]) -> None:
    """Bytes per token and capacity of the caches at the same memory, as vLLM itself counts them."""
    capacity = {server.kv_cache_dtype: served_capacity(server.url) for server in servers}
    table = Table(title=f"KV cache of {KV_BYTES >> 20} MiB", title_justify="left", title_style="bold")
    for heading in ("--kv-cache-dtype", "tokens it holds", "bytes per token", "compared"):
        table.add_column(heading, justify="left" if heading.startswith("--") else "right")
    for name, tokens in capacity.items():
        table.add_row(name, f"{tokens:,}", f"{KV_BYTES / tokens:,.0f}", f"{tokens / capacity['auto']:.1f} x")
    console.print("", table)
    console.print(
        "For requests of the model's full length, everything included: codes, anchors, recent tokens, padding."
    )
    served, *others = capacity.values()
    if others and served <= max(others):
        raise DemoError(f"{servers[0].kv_cache_dtype} holds no more tokens than auto.")


def served_capacity(url: str) -> int:
    """Tokens that the running server's cache holds, as it reports them."""
    metrics = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
    match = re.search(r'vllm:cache_config_info{[^}]*kv_cache_size_tokens="(\d+)"', metrics)
    if match is None:
        raise DemoError("the server's /metrics do not tell how many tokens its cache holds.")
    return int(match[1])


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--once", action="store_true", help="stop the server at the end; exit 0 if all went well, else 1"
    )
    parser.add_argument("--port", type=int, default=0, help="port on the loopback interface (default: a free one)")
    models = f"another model to serve: a folder, or {' or '.join(MODELS)}, which is fetched if it is not there"
    parser.add_argument("--model", default=str(EMBEDDED), help=models)
    parser.add_argument("--kv-cache-dtype", default=PRESET, help=f"another preset (default: {PRESET})")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
