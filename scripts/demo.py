"""`make demo`: serve the embedded model at 1 bit with the real vLLM, and ask it something.

Leaves the server running until Ctrl-C; with `--once` it is stopped and the exit code says whether all went well.
"""

import argparse
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).parent.parent
MODEL_NAME = "embedded"
PRESET = "antkv-1bit"
#: The same fixed memory on every machine, so that the two capacities can be compared.
KV_BYTES = 1 << 30
START_TIMEOUT = 900
STOP_TIMEOUT = 30
PROMPT = "It was a cold evening in November, and the old man"
QUESTION = "Tell me about the house by the sea."
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
    if arguments.capacity_of_auto:
        print(json.dumps(capacity_of_auto(arguments.model)))
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="antkv-demo-") as folder:
            return run(arguments, Path(folder, "server.log"))
    except DemoError as error:
        console.print(f"[bold red]The demo failed:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nStopped; the server is gone.")
        return 130 if arguments.once else 0


def run(arguments: argparse.Namespace, log: Path) -> int:
    """The whole demo; DemoError when a step fails."""
    port = arguments.port or _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(Path(sys.executable).with_name("vllm")),
        *("serve", arguments.model, "--kv-cache-dtype", arguments.kv_cache_dtype),
        *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--kv-cache-memory-bytes", str(KV_BYTES)),
        # Compiling takes longer than a few answers of a small model, and needs a compiler.
        "--enforce-eager",
    ]
    console.print(f"[bold]$[/] {' '.join(command)}", soft_wrap=True)
    auto = [sys.executable, __file__, "--capacity-of-auto", "--model", arguments.model]
    with _running(command, log) as server, _running(auto, log.with_name("auto.json"), quiet=True) as counting:
        wait_until_healthy(server, url, log)
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        try:
            complete(client)
            chat(client)
        except OpenAIError as error:
            raise DemoError(f"the server did not answer ({error}).\n{_tail(log)}") from None
        report(arguments.kv_cache_dtype, served_capacity(url), _capacity_from(counting, log.with_name("auto.json")))
        if arguments.once:
            console.print("[green]All of it worked.[/] Stopping the server.")
            return 0
        console.print(
            f"\nThe server keeps running at [bold]{url}[/] until Ctrl-C. Try, in another terminal:\n\n"
            f"  curl {url}/v1/completions -H 'Content-Type: application/json' \\\n"
            f"""    -d '{{"model": "{MODEL_NAME}", "prompt": "The sea was", "max_tokens": 60}}'\n""",
            soft_wrap=True,
        )
        if server.wait():
            raise DemoError(f"the server stopped by itself.\n{_tail(log)}")
    return 0


def wait_until_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Show the stages of the start until `/health` answers."""
    begin = time.monotonic()
    stages = list(STAGES)
    with console.status("Starting vLLM ...") as status:
        while True:
            elapsed = time.monotonic() - begin
            text = log.read_text(errors="replace")
            while reached := [stage for stage in stages if re.search(stage[0], text)]:
                stages.remove(reached[0])
                match = re.search(reached[0][0], text)
                detail = f": {match[1]}" if match and match.groups() else ""
                console.print(f"{elapsed:6.0f} s  {escape(reached[0][1] + detail)}", soft_wrap=True)
            status.update(f"Starting vLLM ... {elapsed:.0f} s" + (f", next: {stages[0][1]}" if stages else ""))
            if _answers(f"{url}/health"):
                console.print(f"{elapsed:6.0f} s  [green]healthy[/]")
                return
            if server.poll() is not None:
                raise DemoError(f"the server stopped with exit code {server.returncode}.\n{_tail(log)}")
            if elapsed > START_TIMEOUT:
                raise DemoError(f"the server was not ready after {START_TIMEOUT} s.\n{_tail(log)}")
            time.sleep(0.5)


def complete(client: OpenAI) -> None:
    """One streamed completion, printed as it comes."""
    console.print(f"\n[bold]Completion[/] (streamed)\n[dim]{PROMPT}[/]", end="")
    length = 0
    stream = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=80, temperature=0.6, seed=1, stream=True
    )
    for chunk in stream:
        text = chunk.choices[0].text
        length += len(text)
        console.print(text, end="", markup=False, soft_wrap=True)
    console.print()
    if not length:
        raise DemoError("the completion came back empty.")


def chat(client: OpenAI) -> None:
    """One chat request."""
    console.print(f"\n[bold]Chat[/]\n[dim]{QUESTION}[/]")
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=80,
        temperature=0.6,
        seed=1,
        extra_body={"min_tokens": 8},
    )
    text = answer.choices[0].message.content
    if not text:
        raise DemoError("the chat answer came back empty.")
    console.print(text, markup=False)


def report(dtype: str, served: int, auto: int) -> None:
    """Bytes per token and capacity, beside those of `auto` at the same memory."""
    table = Table(title=f"KV cache of {KV_BYTES >> 20} MiB", title_justify="left", title_style="bold")
    for heading in ("--kv-cache-dtype", "tokens it holds", "bytes per token", "compared"):
        table.add_column(heading, justify="left" if heading.startswith("--") else "right")
    for name, tokens in (("auto", auto), (dtype, served)):
        table.add_row(name, f"{tokens:,}", f"{KV_BYTES / tokens:,.0f}", f"{tokens / auto:.1f} x")
    console.print("", table)
    console.print(
        f"{dtype}: vLLM's own figure for requests of the model's full length, everything included (codes, anchors, "
        "recent tokens, padding). auto: what vLLM's own code computes for the same memory.",
        soft_wrap=True,
    )
    if dtype != "auto" and served <= auto:
        raise DemoError(f"{dtype} holds no more tokens than auto.")


def served_capacity(url: str) -> int:
    """Tokens that the running server's cache holds, as it reports them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        metrics = response.read().decode()
    match = re.search(r'vllm:cache_config_info{[^}]*kv_cache_size_tokens="(\d+)"', metrics)
    if match is None:
        raise DemoError("the server's /metrics do not tell how many tokens its cache holds.")
    return int(match[1])


def capacity_of_auto(model: str) -> int:
    """Tokens that a cache of the model's own dtype would hold, computed as vLLM does at start-up."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_antkv.hooks.moved import kv_cache_planning

    config = EngineArgs(model=model, kv_cache_dtype="auto", kv_cache_memory_bytes=KV_BYTES).create_engine_config()
    # The engine asks the backend; which layout it is does not change how many blocks fit.
    config.cache_config.kv_cache_layout = "LBNHC"
    layer = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=config.model_config.get_num_kv_heads(config.parallel_config),
        head_size=config.model_config.get_head_size(),
        dtype=config.model_config.dtype,
    )
    specs = {f"layers.{i}": layer for i in range(config.model_config.get_num_layers(config.parallel_config))}
    planning = kv_cache_planning()
    groups = planning.get_kv_cache_groups(config, specs)
    return get_kv_cache_capacity(config, planning.get_kv_cache_config_from_groups(config, groups, KV_BYTES))[0]


def _capacity_from(counting: subprocess.Popen[bytes], output: Path) -> int:
    if counting.wait(timeout=300):
        raise DemoError("the capacity of auto could not be computed.")
    return int(json.loads(output.read_text().splitlines()[-1]))


@contextmanager
def _running(command: list[str], output: Path, quiet: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which ends with this block, or with this process, whatever ends that."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    environment["VLLM_LOGGING_LEVEL"] = "ERROR" if quiet else "INFO"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.DEVNULL if quiet else subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        yield process
    finally:
        _stop(process)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask first; then end whatever is left of the session, engine and workers included."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(STOP_TIMEOUT)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _tail(log: Path, lines: int = 25) -> str:
    """The last lines of the log, or its last error with what led to it."""
    text = log.read_text(errors="replace").splitlines()
    errors = [line for line in text if re.search(r"\b\w*(Error|Exception)\b: ", line)]
    return "\n".join([*text[-lines:], *([""] if errors else []), *errors[:1]])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--once", action="store_true", help="stop the server at the end; exit 0 if all went well, else 1"
    )
    parser.add_argument("--port", type=int, default=0, help="port on the loopback interface (default: a free one)")
    parser.add_argument("--model", default=str(ROOT / "models" / "embedded"), help="another model to serve")
    parser.add_argument("--kv-cache-dtype", default=PRESET, help=f"another preset (default: {PRESET})")
    parser.add_argument("--capacity-of-auto", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
