"""Prometheus metrics of the cache, named and labelled as vLLM's own.

Gauges carry vLLM's multiprocess mode and counters are written by one process alone, so that `/metrics` is right with
several API servers too.
"""

from collections.abc import Iterable

from prometheus_client import Counter, Gauge

from vllm_antkv.vllm_adapter.server.status import EngineStatus, Setup

_LABELS = ("model_name", "engine")


class Metrics:
    """All metrics of a server.

    vLLM unregisters every metric called `vllm:` when it makes its own: create this after the engine client.
    """

    def __init__(self, setup: Setup, model_name: str) -> None:
        self._setup = setup
        self._model_name = model_name
        self._totals: dict[tuple[Counter, tuple[str, ...]], float] = {}
        self._nominal_bits = _gauge("nominal_bits", "Bits per K or V element of the codes alone.")
        self._effective_bits = _gauge(
            "effective_bits",
            f"Bits per K or V element of everything that a sequence of {setup.bits.at_tokens} tokens takes.",
        )
        self._bytes_per_token = _gauge(
            "kv_bytes_per_token",
            f"KV cache bytes per token, all layers, of a sequence of {setup.bits.at_tokens} tokens, by part.",
            "part",
        )
        self._codebook = _gauge("codebook_info", "The codebook that is served; always 1.", "preset", "identity")
        self._pages = _gauge("pages_in_use", "KV cache pages that requests hold, by class.", "page")
        self._kv_bytes = _gauge("kv_bytes", "KV cache bytes that requests hold, all layers, by class of page.", "page")
        self._bf16_bytes = _gauge("bf16_kv_bytes", "KV cache bytes that the same tokens would take in BF16.")
        self._held_tokens = _gauge("tokens_in_use", "Tokens in the KV cache that requests hold.")
        self._tokens = _counter("tokens_stored", "Tokens written to the KV cache, recomputed ones included.")
        self._anchors = _counter("anchors_chosen", "Tokens kept as anchors, the mean over KV heads, K and V.")
        self._sinks = _counter("sinks_found", "Tokens that KVSink flagged as attention sinks.")
        self._attention = _counter(
            "sampled_attention", "Sampled queries, by the kind of stored vectors that their attention went to.", "rows"
        )
        self._fallbacks = _counter(
            "fallbacks", "Attention calls that the kernels chosen at start-up did not serve; not 0 is a bug."
        )
        self._calls = _counter(
            "operation_calls", "Calls of an operation, in all layers; counted on CPUs only.", "operation"
        )
        self._seconds = _counter(
            "operation_seconds", "Time in an operation, in all layers; measured on CPUs only.", "operation"
        )
        self._store_bytes = _gauge("store_bytes", "Bytes of the files with pages, of all servers with this folder.")
        self._store_saved = _gauge(
            "store_seconds_saved", "An estimate: what tokens with pages from files would have taken to compute."
        )
        self._store_hits = _counter("store_hits", "Requests that had pages from files.")
        self._store_evictions = _counter(
            "store_evictions", "Files that the limit has cost, in the life of the folder, of all servers."
        )

    def update(self, engines: Iterable[EngineStatus]) -> None:
        """Update all metrics from the engines' last answers."""
        for status in engines:
            labels = (self._model_name, str(status.engine))
            self._show_setup(labels)
            for page, count in status.pages_in_use.items():
                self._pages.labels(*labels, page).set(count)
                self._kv_bytes.labels(*labels, page).set(count * self._setup.pool_page_bytes)
            self._held_tokens.labels(*labels).set(status.tokens_in_use)
            self._bf16_bytes.labels(*labels).set(status.tokens_in_use * self._setup.bf16_bytes_per_token)
            self._raise_to(self._tokens, labels, status.tokens_stored)
            self._raise_to(self._anchors, labels, status.anchors_chosen)
            self._raise_to(self._sinks, labels, status.sinks_found)
            if status.fallbacks is not None:
                self._raise_to(self._fallbacks, labels, status.fallbacks)
            for row_class, total in status.sampled_attention.items():
                self._raise_to(self._attention, (*labels, row_class), total)
            for name, operation in status.operations.items():
                self._raise_to(self._calls, (*labels, name), operation.calls)
                self._raise_to(self._seconds, (*labels, name), operation.seconds)
            if status.store is not None:
                self._store_bytes.labels(*labels).set(status.store.num_bytes)
                self._store_saved.labels(*labels).set(status.store.seconds_saved)
                self._raise_to(self._store_hits, labels, status.store.hits)
                self._raise_to(self._store_evictions, labels, status.store.evictions)

    def _show_setup(self, labels: tuple[str, str]) -> None:
        bits, codebook = self._setup.bits, self._setup.codebook
        self._nominal_bits.labels(*labels).set(bits.nominal)
        self._effective_bits.labels(*labels).set(bits.effective)
        for part, num_bytes in self._setup.kv_bytes_per_token.items():
            self._bytes_per_token.labels(*labels, part).set(num_bytes)
        self._codebook.labels(*labels, self._setup.preset, codebook.identity).set(1)

    def _raise_to(self, counter: Counter, labels: tuple[str, ...], total: float) -> None:
        """Raise a counter to the engine's total; after a restart the engine counts from zero."""
        last = self._totals.get((counter, labels), 0)
        counter.labels(*labels).inc(total - last if total >= last else total)
        self._totals[counter, labels] = total


def _gauge(name: str, documentation: str, *labels: str) -> Gauge:
    return Gauge(f"vllm:antkv_{name}", documentation, (*_LABELS, *labels), multiprocess_mode="mostrecent")


def _counter(name: str, documentation: str, *labels: str) -> Counter:
    return Counter(f"vllm:antkv_{name}", documentation, (*_LABELS, *labels))
