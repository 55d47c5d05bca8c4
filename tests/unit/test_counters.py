"""Counters: what they count, and which times they claim."""

import pytest
import torch

from vllm_antkv.ops.counters import Counters, merged


@pytest.fixture
def counters() -> Counters:
    return Counters(torch.device("cpu"), "reference", 4)


def test_tokens_and_sinks_add_up_over_steps(counters):
    for is_sink in ([True, False, True], [False], [False, False]):
        counters.count_step(len(is_sink))
        counters.count_sinks(torch.tensor(is_sink), torch.tensor(len(is_sink)))
    report = counters.report()
    assert (report["steps"], report["tokens_stored"], report["sinks_found"]) == (3, 6, 2)


def test_rows_that_pad_a_step_are_no_sinks(counters):
    counters.count_sinks(torch.tensor([True, False, True, True]), torch.tensor(2))
    assert counters.report()["sinks_found"] == 1


def test_anchors_are_tokens_averaged_over_kv_heads_and_over_k_and_v(counters):
    """Two blocks close, with three rows for each of two KV heads; the second block has one row that stays unused."""
    offsets = torch.tensor([[[5, 9, 0]] * 2, [[7, 1, -1]] * 2])
    counters.count_anchors(offsets)
    counters.count_anchors(offsets)
    assert counters.report()["anchors_chosen"] == 5


def test_sampled_attention_adds_up(counters):
    counters.count_attention(torch.tensor([0.5, 0.25, 0.25]))
    counters.count_attention(torch.tensor([0.25, 0.5, 0.25]))
    assert counters.report()["sampled_attention"] == {"recent": 0.75, "anchors": 0.75, "codes": 0.5}


def test_no_blocks_closed_is_no_anchors(counters):
    counters.count_anchors(torch.empty(0, 2, 3, dtype=torch.int64))
    assert counters.report()["anchors_chosen"] == 0


def test_nothing_is_claimed_of_operations_that_the_host_only_queues(counters, monkeypatch):
    monkeypatch.setattr(counters, "_host_computes", False)
    with counters.timed("attend"):
        pass
    assert counters.report()["operations"] == {}


def test_stages_of_a_pipeline_have_the_kernels_of_all():
    stages = [Counters(torch.device("cpu"), name, 1).report() for name in ("cuda", "triton+cuda", "cuda")]
    assert merged(stages)["implementation"] == "cuda+triton"
