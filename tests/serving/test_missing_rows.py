"""An engine whose block manager loses pages ends the request that lacks them, and no other."""

from typing import Any

import numpy as np
import pytest

from tests.serving.conftest import EMBEDDED, flush, transfer

NUM_TOKENS = 6


@pytest.fixture
def losing_pages(monkeypatch) -> None:
    """The pages of recent rows of requests called "broken" are null."""
    from vllm_antkv.vllm_adapter.block_pool.managers import RecencyManager

    count = RecencyManager.get_num_blocks_to_allocate

    def count_none(self: RecencyManager, request_id: str, *args: Any, **kwargs: Any) -> int:
        number = count(self, request_id, *args, **kwargs)
        if request_id.startswith("broken") and request_id in self._counted:
            *step, pages = self._counted[request_id]
            self._counted[request_id] = (*step, np.zeros_like(pages))
        return number

    monkeypatch.setattr(RecencyManager, "get_num_blocks_to_allocate", count_none)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_request_that_lacks_rows_ends_with_an_error(start_engine, default, prompts, losing_pages, said, kernels):
    with start_engine(EMBEDDED, "antkv-1bit", {**default, "kernels": kernels}) as engine:
        (alone,) = engine.complete([prompts[-2]], max_tokens=NUM_TOKENS)
        for name, prompt in (("whole", prompts[-2]), ("broken", prompts[-1])):
            engine.add(name, prompt, NUM_TOKENS)
        ended = {each.request_id: each.outputs[0] for outputs in engine.steps() for each in outputs}
        assert ended["whole"].finish_reason == "length"
        assert tuple(ended["whole"].token_ids) == alone.tokens
        assert ended["broken"].finish_reason == "error"
        # The step of the prompt has all rows in hand, and the next one lacks them.
        assert len(ended["broken"].token_ids) == 1
        (sentence,) = [line for line in said if "has no page" in line]
        assert sentence.startswith("Request broken")
        engine.assert_all_blocks_free()
        # Nobody is given what it computed.
        assert engine.complete([prompts[-1]])[0].num_cached_tokens == 0


def test_no_page_of_a_step_that_lacks_rows_is_stored(start_engine, default, prompts, losing_pages, tmp_path):
    """Other servers would read it."""
    options = {"kv_transfer_config": transfer(tmp_path), "max_num_batched_tokens": 300}
    with start_engine(EMBEDDED, "antkv-1bit", default, **options) as engine:
        engine.add("broken", prompts[-1], NUM_TOKENS)
        (request,) = engine.core.scheduler.requests.values()
        # A step computes nothing while the request waits for the folder's answer.
        while not request.num_computed_tokens:
            engine.step()
        engine.llm.collective_rpc(flush)
        before = sorted(tmp_path.rglob("*"))
        assert before
        (broken,) = engine.step()
        assert broken.outputs[0].finish_reason == "error"
        engine.llm.collective_rpc(flush)
        assert sorted(tmp_path.rglob("*")) == before
        engine.add("whole", prompts[-1], NUM_TOKENS)
        list(engine.steps())
        engine.llm.collective_rpc(flush)
        assert sorted(tmp_path.rglob("*")) != before
