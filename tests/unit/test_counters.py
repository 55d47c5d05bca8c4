"""Counters: what they count, and which times they claim."""

import pytest
import torch

from vllm_antkv.ops.counters import Counters, merged


@pytest.fixture
def counters() -> Counters:
    return Counters(torch.device("cpu"), "reference", 4)


def test_rows_that_pad_a_step_are_no_sinks(counters):
    counters.count_sinks(torch.tensor([True, False, True, True]), torch.tensor(2))
    assert counters.report()["sinks_found"] == 1


def test_anchors_are_tokens_averaged_over_kv_heads_and_over_k_and_v(counters):
    """Two blocks close, with three rows for each of two KV heads; the second block has one row that stays unused."""
    offsets = torch.tensor([[[5, 9, 0]] * 2, [[7, 1, -1]] * 2])
    counters.count_anchors(offsets)
    counters.count_anchors(offsets)
    assert counters.report()["anchors_chosen"] == 5


def test_nothing_is_claimed_of_operations_that_the_host_only_queues(counters, monkeypatch):
    monkeypatch.setattr(counters, "_host_computes", False)
    with counters.timed("attend"):
        pass
    assert counters.report()["operations"] == {}


def test_stages_of_a_pipeline_have_the_kernels_of_all():
    stages = [Counters(torch.device("cpu"), name, 1).report() for name in ("cuda", "triton+cuda", "cuda")]
    assert merged(stages)["implementation"] == "cuda+triton"
