"""A real server of the embedded model, with the centroids that are shipped; tests that ask it alike share one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from loadtest.server import EMBEDDED, Server, running_server
from loadtest.soak import ENVIRONMENT
from tests.patience import PATIENCE

PRESET = "antkv-1bit"
API_KEY = "sesame"
MAX_MODEL_LEN = 1024
_OPTIONS = {
    "--api-key": API_KEY,
    "--dtype": "float32",
    "--max-model-len": str(MAX_MODEL_LEN),
    "--kv-cache-memory-bytes": str(1 << 24),
    "--served-model-name": "embedded",
    "--shutdown-timeout": str(PATIENCE),
}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # A line of the sampler, for log-probabilities: the server of `tests.serving.server` compiles it.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    **ENVIRONMENT,
}


def embedded_server(folder: Path, kv_cache_dtype: str) -> AbstractContextManager[Server]:
    """A server that runs while this is open, with its log in `folder`."""
    arguments = ["--enforce-eager", *(part for pair in _OPTIONS.items() for part in pair)]
    return running_server(str(EMBEDDED), kv_cache_dtype, folder / "server.log", arguments, _ENVIRONMENT)


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
