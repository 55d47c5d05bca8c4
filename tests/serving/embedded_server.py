"""A real server of the embedded model with the centroids that are shipped; tests that ask it alike share one."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from loadtest.server import EMBEDDED, running_server
from loadtest.server import Server as LoadedServer
from loadtest.soak import ENVIRONMENT
from tests.patience import PATIENCE
from tests.planted import shipped_codebook
from vllm_antkv.codebook import Codebook, SinkRule, codebook_path

PRESET = "antkv-1bit"
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
}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_PLUGINS": "antkv",
    **ENVIRONMENT,
}


@dataclass(frozen=True)
class Server(LoadedServer):
    """A running server.

    codebook: the file that it serves: of its rule for sinks, every token is one.
    """

    codebook: Path

    def get(self, path: str, key: str | None = API_KEY) -> httpx.Response:
        """GET with this API key, or with none."""
        return httpx.get(self.url + path, headers=_authorisation(key), timeout=PATIENCE)

    def complete(self, prompt: list[int], max_tokens: int) -> None:
        """Generate exactly `max_tokens` tokens."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        url = self.url + "/v1/completions"
        httpx.post(url, json=body, headers=_authorisation(API_KEY), timeout=PATIENCE).raise_for_status()


def _authorisation(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@contextmanager
def embedded_server(
    folder: Path, kv_cache_dtype: str, settings: Mapping[str, Any] = MappingProxyType({}), *more: str
) -> Iterator[Server]:
    """A server that runs while this is open, with its codebook and log in `folder`; `more` of its arguments."""
    path = codebook_path(folder / "codebooks", PRESET)
    codebook = shipped_codebook()
    rule = SinkRule(layer=0, channels=(0,), threshold=1e-30)
    Codebook(codebook.header.model_copy(update={"sinks": rule}), codebook.k, codebook.v).save(path)
    ours = json.dumps({"antkv": {"codebooks": str(path.parent), **settings}})
    options = _OPTIONS | ({"--additional-config": ours} if kv_cache_dtype == PRESET else {})
    arguments = ["--enforce-eager", *more, *(part for pair in options.items() for part in pair)]
    log = folder / "server.log"
    with running_server(str(EMBEDDED), kv_cache_dtype, log, arguments, _ENVIRONMENT) as running:
        yield Server(running.url, running.pid, path)


class SharedServer:
    """One at 1 bit, started when it is first asked for."""

    def __init__(self, held: ExitStack, make_folder: Callable[[], Path]) -> None:
        """held: ends what was started."""
        self._held, self._make_folder = held, make_folder
        self._running: Server | None = None

    def running(self) -> Server:
        """The server, for a test that leaves it as it is."""
        if self._running is None:
            self._running = self._held.enter_context(embedded_server(self._make_folder(), PRESET))
        return self._running

    def to_be_ended(self) -> Server:
        """The server, for a test that ends it: whoever asks afterwards gets another, so that no order is needed."""
        server, self._running = self.running(), None
        return server
