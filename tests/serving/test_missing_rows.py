"""An engine whose block manager loses pages ends the request that lacks them, and no other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving.conftest import EMBEDDED, Engine, flush

NUM_TOKENS = 6


@pytest.fixture
def losing_pages(monkeypatch: pytest.MonkeyPatch) -> None:
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


def add(engine: Engine, name: str, prompt: list[int]) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)


def step(engine: Engine) -> dict[str, Any]:
    """Completions so far, by request."""
    return {each.request_id: each.outputs[0] for each in engine.llm.llm_engine.step()}


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_request_that_lacks_rows_ends_with_an_error(
    start_engine: Callable[..., Any],
    default: dict[str, Any],
    prompts: list[list[int]],
    losing_pages: None,
    said: list[str],
    kernels: str,
) -> None:
    with start_engine(EMBEDDED, "antkv-1bit", {**default, "kernels": kernels}) as engine:
        (alone,) = engine.complete([prompts[-2]], max_tokens=NUM_TOKENS)
        for name, prompt in (("whole", prompts[-2]), ("broken", prompts[-1])):
            add(engine, name, prompt)
        ended = {}
        while engine.llm.llm_engine.has_unfinished_requests():
            ended |= step(engine)
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


def test_no_page_of_a_step_that_lacks_rows_is_stored(
    start_engine: Callable[..., Any],
    default: dict[str, Any],
    prompts: list[list[int]],
    losing_pages: None,
    tmp_path: Path,
) -> None:
    """Other servers would read it."""
    extra = {"folder": str(tmp_path)}
    transfer = {"kv_connector": "AntKVStore", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    options = {"kv_transfer_config": transfer, "max_num_batched_tokens": 300}
    with start_engine(EMBEDDED, "antkv-1bit", default, **options) as engine:
        add(engine, "broken", prompts[-1])
        (request,) = engine.core.scheduler.requests.values()
        # A step computes nothing while the request waits for the folder's answer.
        while not request.num_computed_tokens:
            step(engine)
        engine.llm.collective_rpc(flush)
        before = sorted(tmp_path.rglob("*"))
        assert before
        assert step(engine)["broken"].finish_reason == "error"
        engine.llm.collective_rpc(flush)
        assert sorted(tmp_path.rglob("*")) == before
        add(engine, "whole", prompts[-1])
        while engine.llm.llm_engine.has_unfinished_requests():
            step(engine)
        engine.llm.collective_rpc(flush)
        assert sorted(tmp_path.rglob("*")) != before
