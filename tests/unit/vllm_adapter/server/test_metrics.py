"""Metrics follow what the engines count."""

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, Gauge
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.counters import OperationReport, Report
from vllm_antkv.vllm_adapter.server.metrics import Metrics
from vllm_antkv.vllm_adapter.server.status import Bits, CodebookInfo, EngineStatus, Page, Setup

SETUP = Setup(
    preset="antkv-1bit",
    layers=("antkv-1bit", "antkv-1bit"),
    bits=Bits(
        nominal=1,
        effective=1.5,
        parts={"codes": 1, "anchors": 0.25, "recency": 0.125, "padding": 0.125},
        at_tokens=8192,
    ),
    kv_bytes_per_token={"codes": 100, "anchors": 25, "recency": 12.5, "padding": 12.5},
    settings=AntKVConfig(),
    codebook=CodebookInfo(identity="abc", path="/models/abc.safetensors", bytes=1000),
    pages={"vq": Page(block_size=128, bytes=2576), "recency": Page(block_size=4, bytes=2080)},
    pool_page_bytes=1000,
    bf16_bytes_per_token=50,
    versions={"vllm_antkv": "0.1.0"},
)
#: Of the engines that report.
NUM_LAYERS = 2


def report(tokens: int, seconds: float = 0.5, anchors: float = 2.0, missing_calls: int = 0) -> Report:
    work = OperationReport(calls=NUM_LAYERS * tokens - missing_calls, seconds=seconds)
    return Report(
        implementation="reference",
        steps=tokens,
        tokens_stored=tokens,
        anchors_chosen=anchors,
        sinks_found=3,
        sampled_attention={"recent": 1.0, "anchors": anchors / 4, "codes": 2.0},
        operations={"attend": work},
    )


def engine_status(*workers: Report, engine: int = 0, vq: int = 7) -> EngineStatus:
    return EngineStatus.of(engine, answer(*workers, vq=vq))


def answer(*workers: Report, vq: int = 7) -> dict[str, Any]:
    """What an engine core answers to `antkv_status`."""
    return {
        "pool_pages": 100,
        "pages_in_use": {"vq": vq, "recency": 4},
        "tokens_in_use": 100 * vq,
        "num_layers": NUM_LAYERS,
        "workers": list(workers),
        "store": None,
    }


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    unregister_vllm_metrics()
    yield Metrics(SETUP, "model")
    unregister_vllm_metrics()


def value(name: str, engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm:antkv_{name}", {"model_name": "model", "engine": str(engine), **labels})


def test_pages_follow_the_last_answer(metrics):
    metrics.update([engine_status(report(0), vq=7)])
    metrics.update([engine_status(report(0), vq=2)])
    by_page = [[value(name, page=page) for page in ("vq", "recency")] for name in ("pages_in_use", "kv_bytes")]
    assert by_page == [[2, 4], [2000, 4000]]
    assert (value("tokens_in_use"), value("bf16_kv_bytes")) == (200, 10000)


def test_counters_go_on_when_an_engine_counts_from_zero_again(metrics):
    for tokens in (10, 4, 5):
        metrics.update([engine_status(report(tokens))])
    assert value("tokens_stored_total") == 15


def test_calls_that_are_missing_are_fallbacks(metrics):
    metrics.update([engine_status(report(10))])
    assert value("fallbacks_total") == 0
    metrics.update([engine_status(report(20, missing_calls=3))])
    assert value("fallbacks_total") == 3


def test_nothing_is_shown_of_operations_that_are_not_counted(metrics):
    metrics.update([engine_status(report(1) | {"operations": {}})])
    assert value("tokens_stored_total") == 1
    for name in ("operation_calls_total", "operation_seconds_total"):
        assert value(name, operation="attend") is None
    assert value("fallbacks_total") is None


def test_a_store_is_shown_where_there_is_one(metrics):
    metrics.update([engine_status(report(1))])
    assert value("store_hits_total") is None
    assert value("store_bytes") is None
    store = {"lookups": 9, "hit_tokens": 1024, "seconds_saved": 1.5, "num_bytes": 4000, "max_bytes": None}
    for hits, evictions in [(1, 10), (3, 12)]:
        told = {**answer(report(1)), "store": {**store, "hits": hits, "evictions": evictions}}
        metrics.update([EngineStatus.of(0, told)])
    names = ("hits_total", "evictions_total", "bytes", "seconds_saved")
    assert [value(f"store_{name}") for name in names] == [3, 12, 4000, 1.5]


def test_gauges_of_several_processes_show_the_last_value(metrics):
    """As vLLM's own; prometheus_client's default adds a pid label."""
    gauges: list[Any] = [each for each in vars(metrics).values() if isinstance(each, Gauge)]
    assert gauges
    assert {gauge._multiprocess_mode for gauge in gauges} == {"mostrecent"}


def test_tensor_parallel_workers_count_as_one_engine():
    status = engine_status(report(10, seconds=1.0, anchors=2.0), report(10, seconds=3.0, anchors=3.0))
    assert (status.tokens_stored, status.sinks_found, status.anchors_chosen) == (10, 3, 2.5)
    assert status.sampled_attention == {"recent": 1, "anchors": 0.625, "codes": 2}
    assert status.operations["attend"].model_dump() == {"calls": 20, "seconds": 3.0}
