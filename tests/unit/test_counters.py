"""Counters: what they count, and which times they claim."""

import time

import pytest
import torch

from vllm_antkv.ops.counters import OPERATIONS, Counters


@pytest.fixture
def counters() -> Counters:
    return Counters(torch.device("cpu"), "reference")


def test_a_new_worker_has_counted_nothing(counters: Counters) -> None:
    report = counters.report()
    assert report["implementation"] == "reference"
    assert (report["tokens_stored"], report["anchors_chosen"], report["sinks_found"]) == (0, 0, 0)
    assert report["operations"] == {name: {"calls": 0, "seconds": 0} for name in OPERATIONS}


def test_tokens_and_sinks_add_up_over_steps(counters: Counters) -> None:
    counters.count_step(3, torch.tensor([True, False, True]))
    counters.count_step(1, torch.tensor([False]))
    counters.count_step(2, None)
    report = counters.report()
    assert report["tokens_stored"] == 6
    assert report["sinks_found"] == 2


def test_anchors_are_tokens_averaged_over_kv_heads_and_over_k_and_v(counters: Counters) -> None:
    """Two blocks close, with three rows for each of two KV heads; the second block has one row that stays unused."""
    offsets = torch.tensor([[[5, 9, 0]] * 2, [[7, 1, -1]] * 2])
    counters.count_anchors(offsets)
    counters.count_anchors(offsets)
    assert counters.report()["anchors_chosen"] == 5


def test_no_blocks_closed_is_no_anchors(counters: Counters) -> None:
    counters.count_anchors(torch.empty(0, 2, 3, dtype=torch.int64))
    assert counters.report()["anchors_chosen"] == 0


def test_calls_and_seconds_add_up(counters: Counters) -> None:
    start = time.perf_counter()
    for _ in range(2):
        with counters.timed("attend"):
            time.sleep(0.02)
    elapsed = time.perf_counter() - start
    operation = counters.report()["operations"]["attend"]
    assert operation["calls"] == 2
    assert 0.04 <= operation["seconds"] <= elapsed


def test_no_time_is_claimed_where_the_host_only_queues_the_work(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_host_computes", False)
    with counters.timed("attend"):
        pass
    assert counters.report()["operations"]["attend"] == {"calls": 1, "seconds": None}
