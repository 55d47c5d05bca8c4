"""Real servers of the embedded model with the centroids that are shipped; tests that ask them alike share them."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoConfig

from loadtest.server import EMBEDDED, running_server
from loadtest.server import Server as LoadedServer
from loadtest.soak import ENVIRONMENT
from tests.patience import PATIENCE
from tests.serving.conftest import PRESET, transfer
from vllm_antkv.codebook import Codebook, ModelIdentity, SinkRule, codebook_path, find_codebook

API_KEY = "sesame"
MODEL_NAME = "embedded"
MAX_MODEL_LEN = 1024
_OPTIONS = {
    "--api-key": API_KEY,
    "--dtype": "float32",
    "--max-model-len": str(MAX_MODEL_LEN),
    "--kv-cache-memory-bytes": str(1 << 24),
    "--served-model-name": MODEL_NAME,
    "--shutdown-timeout": str(PATIENCE),
    "--scheduling-policy": "priority",
    "--tool-call-parser": "hermes",
}
_FLAGS = ("--enforce-eager", "--enable-prompt-tokens-details", "--enable-prompt-embeds", "--enable-auto-tool-choice")
#: Every row of the past is an anchor of full precision; with a worker of its own, and without VLLM_PLUGINS, which
#: switches routes on.
EXACT = "exact"
#: With `AntKVStore`, in whose folder not all prompts of a soak fit.
STORE = "store"
MAX_BYTES = 3_000_000
#: The servers: `--kv-cache-dtype`, settings.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": (PRESET, {}),
    EXACT: (PRESET, {"anchor_share": 1.0, "anchor_dtype": "model"}),
    STORE: (PRESET, {}),
    "auto": ("auto", {}),
}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Routes that put an engine to sleep, or empty its prefix cache.
    "VLLM_SERVER_DEV_MODE": "1",
    **ENVIRONMENT,
}


@dataclass(frozen=True)
class Server(LoadedServer):
    """A running server.

    codebook: the file that it serves: of its rule for sinks, every token is one.
    pages: the folder of its store, if it has one.
    """

    codebook: Path
    pages: Path

    def get(self, path: str, key: str | None = API_KEY) -> httpx.Response:
        return httpx.get(self.url + path, headers=_authorisation(key), timeout=PATIENCE)

    def complete(self, prompt: list[int], max_tokens: int) -> None:
        """Generate exactly `max_tokens` tokens."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        url = self.url + "/v1/completions"
        httpx.post(url, json=body, headers=_authorisation(API_KEY), timeout=PATIENCE).raise_for_status()


def _authorisation(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@contextmanager
def embedded_server(folder: Path, kind: str) -> Iterator[Server]:
    """A server that runs while this is open, with its codebook and log in `folder`."""
    kv_cache_dtype, settings = KINDS[kind]
    path = codebook_path(folder / "codebooks", PRESET)
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(EMBEDDED))
    codebook = Codebook.load(find_codebook(str(EMBEDDED), identity, PRESET))
    rule = SinkRule(layer=0, channels=(0,), threshold=1e-30)
    Codebook(codebook.header.model_copy(update={"sinks": rule}), codebook.k, codebook.v).save(path)
    # Tests ask twice, and the second time prefixes are found.
    ours = json.dumps({"antkv": {"codebooks": str(path.parent), "prefill_reads_cache": True, **settings}})
    options = _OPTIONS | ({"--additional-config": ours} if kv_cache_dtype == PRESET else {})
    pages = folder / "pages"
    if kind == STORE:
        options["--kv-transfer-config"] = json.dumps(transfer(pages, max_bytes=MAX_BYTES))
    environment = dict(_ENVIRONMENT)
    if kind == EXACT:
        options["--distributed-executor-backend"] = "mp"
    else:
        environment["VLLM_PLUGINS"] = "antkv"
    arguments = [*_FLAGS, *(part for pair in options.items() for part in pair)]
    log = folder / "server.log"
    with running_server(str(EMBEDDED), kv_cache_dtype, log, arguments, environment) as running:
        yield Server(running.url, running.pid, path, pages)


class SharedServers:
    """One of each kind, started when it is first asked for."""

    def __init__(self, held: ExitStack, make_folder: Callable[[], Path]) -> None:
        """held: ends what was started."""
        self._held, self._make_folder = held, make_folder
        self._running: dict[str, Server] = {}

    def running(self, kind: str = "default") -> Server:
        """A server, for a test that leaves it as it is."""
        if kind not in self._running:
            self._running[kind] = self._held.enter_context(embedded_server(self._make_folder(), kind))
        return self._running[kind]

    def to_be_ended(self, kind: str = "default") -> Server:
        """A server, for a test that ends it: whoever asks afterwards gets another, so that no order is needed."""
        self.running(kind)
        return self._running.pop(kind)
