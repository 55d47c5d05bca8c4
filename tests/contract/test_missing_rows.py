"""vLLM's scheduler ends a request that lacks rows with an error, and shares nothing that it computed."""

import pytest
from vllm.v1.engine import FinishReason

from tests.contract.random_schedules import CASES, new_requests, sampled, scheduler_of
from vllm_antkv import plugin
from vllm_antkv.vllm_adapter.step.missing_rows import FIELD

pytestmark = pytest.mark.serving


def test_a_request_that_lacks_rows_ends_with_an_error_while_the_next_step_is_under_way(said, reads_well):
    """One step after the other: `tests/serving/test_missing_rows.py`."""
    plugin.register()
    scheduler, _ = scheduler_of(CASES[0], is_async=True)
    whole, broken = (request for _, request in new_requests(CASES[0], 0, scheduler)[:2])
    for request in (whole, broken):
        scheduler.add_request(request)
    # The prompts, in several steps.
    while broken.num_computed_tokens < broken.num_prompt_tokens:
        output = scheduler.schedule()
        scheduler.update_from_output(output, sampled(scheduler, output))
    output = scheduler.schedule()
    result = sampled(scheduler, output)
    result.sampled_token_ids[result.req_id_to_index[broken.request_id]] = []
    setattr(result, FIELD, [broken.request_id])
    later = scheduler.schedule()
    late_result = sampled(scheduler, later)
    pool = scheduler.kv_cache_manager.block_pool
    held = {id for ids in scheduler.kv_cache_manager.get_block_ids(broken.request_id) for id in ids if id}
    (outputs,) = scheduler.update_from_output(output, result).values()
    (ended,) = [each for each in outputs.outputs if each.request_id == broken.request_id]
    assert ended.finish_reason == FinishReason.ERROR
    assert not ended.new_token_ids
    assert held
    assert all(pool.blocks[id].block_hash is None for id in held)
    (sentence,) = [line for line in said if "ends with an error" in line]
    assert sentence.startswith(f"Request {broken.request_id} ends with an error")
    reads_well(RuntimeError(sentence))
    setattr(late_result, FIELD, [broken.request_id])
    scheduler.update_from_output(later, late_result)
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        assert list(output.num_scheduled_tokens) == [whole.request_id]
        scheduler.update_from_output(output, sampled(scheduler, output))
    assert whole.get_finished_reason() == FinishReason.LENGTH
    assert sum("ends with an error" in line for line in said) == 1
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
