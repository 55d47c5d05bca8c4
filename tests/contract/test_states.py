"""No wrong state of a layer without attention enters the prefix cache, under random schedules."""

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.contract.schedule_trace import CASES, Case, scheduler_of, trace
from vllm_antkv import plugin

pytestmark = pytest.mark.serving

WITH_STATES = [case for case in CASES if case.num_states]
SEEDS = range(3)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("case", WITH_STATES, ids=lambda case: f"{case.num_pages} pages")
def test_published_states_are_those_of_their_tokens(case: Case, is_async: bool) -> None:
    plugin.register()
    steps = [line for seed in SEEDS for line in trace(case, seed, is_async) if line[0] != "pool"]
    assert sum(hit for step in steps for _, hit in step[2]) > 500
    assert any(step[3] for step in steps)


def test_without_the_hook_wrong_states_would_be_published(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    monkeypatch.setattr(Scheduler, "__init__", Scheduler.__init__.__wrapped__)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="a wrong state is shared"):
        [trace(WITH_STATES[0], seed, is_async=False) for seed in SEEDS]


def test_cpus_zero_no_pages_of_ours() -> None:
    """Beside states vLLM zeroes new blocks, on CPUs by their numbers: those of pages of ours are others."""
    plugin.register()
    scheduler, [[_, _, _, groups, *_]] = scheduler_of(WITH_STATES[1], is_async=False)
    assert scheduler.needs_kv_cache_zeroing
    # It does so for groups whose spec is a FullAttentionSpec.
    assert {spec for spec, _, _ in groups} == {"UniformTypeKVCacheSpecs"}
