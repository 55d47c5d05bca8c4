"""Which tokens of a step get a row of the trained prefix, and what the second model runner is told of it.

The first model runner serves in `tests/serving`; the second one needs a GPU for all but the method that is asked here.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_antkv.attention.trained_prefix import LayerPrefix, PrefixTokens
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.hooks.prefix_tokens import watch

PREFIX = [5, 6, 7]


def places(tokens: PrefixTokens) -> list[list[int]] | None:
    return None if tokens.places is None else [part.tolist() for part in tokens.places]


def test_tokens_and_positions_of_a_mixed_step() -> None:
    tokens = PrefixTokens(PREFIX, torch.device("cpu"))
    # A decode, a whole prompt, another prompt, the rest of a prompt that was cut, and the beginning of one.
    has_prefix = np.array([True, True, False, True, True])
    assert tokens.choose(has_prefix, np.array([9, 0, 0, 1, 0]), np.array([1, 5, 5, 4, 2]))
    assert places(tokens) == [[1, 2, 3, 11, 12, 15, 16], [0, 1, 2, 1, 2, 0, 1]]
    assert not tokens.choose(has_prefix, np.array([9, 5, 5, 4, 3]), np.array([1, 1, 1, 1, 1]))
    assert tokens.places is None


@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6), before=st.integers(0, 3))
def test_however_a_prompt_is_cut_every_position_gets_its_row_once(cuts: list[int], before: int) -> None:
    tokens = PrefixTokens(PREFIX, torch.device("cpu"))
    computed, rows = 0, []
    for new in cuts:
        tokens.choose(np.array([False, True]), np.array([0, computed]), np.array([before, new]))
        for token, position in zip(*(places(tokens) or ([], [])), strict=True):
            assert token - before == position - computed
            rows.append(position)
        computed += new
    assert rows == list(range(min(computed, len(PREFIX))))


def test_rows_are_put_in_and_the_models_own_left_as_they_were() -> None:
    tokens = PrefixTokens(PREFIX, torch.device("cpu"))
    rows = torch.randn(2, 3, 2, 4)
    layer, key, value = LayerPrefix(tokens, *rows), torch.zeros(6, 2, 4), torch.ones(6, 2, 4)
    assert layer.put_in(key, value) == (key, value)
    tokens.choose(np.array([False, True]), np.array([0, 1]), np.array([2, 4]))
    new_key, new_value = layer.put_in(key, value)
    assert torch.equal(new_key[2:4], rows[0, 1:])
    assert torch.equal(new_value[2:4], rows[1, 1:])
    assert not new_key[[0, 1, 4, 5]].any()
    assert not key.any()


class _Runner(GPUModelRunner):
    """Without a device: requests have a place in the table of requests, and that is all."""

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(
            max_num_reqs=4,
            req_id_to_index={},
            prefill_len=SimpleNamespace(np=np.zeros(4, np.int32)),
            num_computed_prefill_tokens=np.zeros(4, np.int32),
        )
        self.use_pp, self.pcp_manager, self.adaptive_verification, self.decode_query_len = False, None, None, 1

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            index = 3 - len(self.req_states.req_id_to_index)
            self.req_states.req_id_to_index[request.req_id] = index
            self.req_states.prefill_len.np[index] = len(request.prompt_token_ids)


def output(num_scheduled: dict[str, int], new: dict[str, list[int]] | None = None) -> SchedulerOutput:
    scheduled = SchedulerOutput.make_empty()
    scheduled.num_scheduled_tokens = num_scheduled
    scheduled.total_num_scheduled_tokens = sum(num_scheduled.values())
    scheduled.scheduled_new_reqs = [
        NewRequestData(name, ids, [], None, None, ([],), 0, None) for name, ids in (new or {}).items()
    ]
    return scheduled


def test_the_second_model_runner_is_asked_in_the_order_of_its_batch() -> None:
    runner, tokens = _Runner(), PrefixTokens(PREFIX, torch.device("cpu"))
    watch(runner, tokens)
    prompts = {"long": [5, 6, 7, 8, 9], "other": [5, 6, 8, 8, 9], "short": [5, 6]}
    step = output({"long": 2, "other": 5, "short": 2}, prompts)
    runner.add_requests(step)
    state, _ = runner.gather_batch_req_state(step, False)
    first = sum(step.num_scheduled_tokens[name] for name in state.req_ids[: state.req_ids.index("long")])
    assert places(tokens) == [[first, first + 1], [0, 1]]

    # The last token of the prefix alone, in a step that would be a graph's.
    computed = runner.req_states.num_computed_prefill_tokens
    computed[runner.req_states.req_id_to_index["long"]] = 2
    one = output({"long": 1})
    assert GPUModelRunner.gather_batch_req_state(runner, one, False)[1] == 1
    state, uniform_token_count = runner.gather_batch_req_state(one, False)
    assert (state.decode_graph_eligible, uniform_token_count) == (False, None)
    assert places(tokens) == [[0], [2]]

    assert runner.gather_batch_req_state(output({"any": 1}), True) == (None, 1)
    assert tokens.places is None

    computed[runner.req_states.req_id_to_index["long"]] = 3
    state, uniform_token_count = runner.gather_batch_req_state(one, False)
    assert (state.decode_graph_eligible, uniform_token_count) == (True, 1)
    assert tokens.places is None


def test_a_runner_whose_methods_take_other_arguments_is_refused(reads_well, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name it had, a method may have another meaning."""
    monkeypatch.setattr(GPUModelRunner, "gather_batch_req_state", lambda self, scheduler_output, dummy_run, where: None)
    with pytest.raises(UnsupportedModelError) as caught:
        watch(_Runner(), PrefixTokens(PREFIX, torch.device("cpu")))
    assert "gather_batch_req_state takes (self, scheduler_output, dummy_run, where)" in reads_well(caught.value)


def test_a_runner_of_another_kind_is_refused(reads_well) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        watch(SimpleNamespace(), PrefixTokens(PREFIX, torch.device("cpu")))
    assert "--train-prefix" in reads_well(caught.value)
