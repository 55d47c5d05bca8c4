"""No wrong state of a layer without attention enters the prefix cache, under random schedules."""

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.contract.random_schedules import CASES, run, scheduler_of
from vllm_antkv import plugin

pytestmark = pytest.mark.serving

SEEDS = range(3)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.num_pages} pages")
def test_published_states_are_those_of_their_tokens(case, is_async):
    plugin.register()
    num_hit, num_preempted = map(sum, zip(*(run(case, seed, is_async) for seed in SEEDS), strict=True))
    assert num_hit > 500
    assert num_preempted > 0


def test_without_the_hook_wrong_states_would_be_published(monkeypatch):
    plugin.register()
    monkeypatch.setattr(Scheduler, "__init__", Scheduler.__init__.__wrapped__)
    with pytest.raises(AssertionError, match="a wrong state is shared"):
        [run(CASES[0], seed, is_async=False) for seed in SEEDS]


def test_cpus_zero_no_pages_of_ours():
    """Beside states vLLM zeroes new blocks, on CPUs by their numbers: those of pages of ours are others."""
    plugin.register()
    scheduler, specs = scheduler_of(CASES[1], is_async=False)
    assert scheduler.needs_kv_cache_zeroing
    # It does so for groups whose spec is a FullAttentionSpec.
    assert set(specs) == {"UniformTypeKVCacheSpecs"}
