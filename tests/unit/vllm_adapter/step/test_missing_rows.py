"""Workers say with a step's tokens which requests lack rows, however vLLM hands these on."""

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from vllm_antkv.vllm_adapter.step.missing_rows import FIELD, Marks


def of_two() -> ModelRunnerOutput:
    return ModelRunnerOutput(["a", "b"], {"a": 0, "b": 1}, [[5], [6]])


class Later(AsyncModelRunnerOutput):
    """Of a step that is still computed."""

    def get_output(self) -> ModelRunnerOutput:
        return of_two()

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        return None


def test_requests_that_lack_nothing_get_what_was_sampled():
    output = of_two()
    marks = torch.tensor([0, 0, 1], dtype=torch.int32)
    assert Marks(marks).added_to(output) is output
    assert output == of_two()
    assert not hasattr(output, FIELD)


def test_a_request_that_lacks_rows_is_named_and_gets_no_token():
    marks = torch.tensor([0, 1, 0], dtype=torch.int32)
    for output in (of_two(), Later()):
        added = Marks(marks).added_to(output)
        found = added.get_output() if isinstance(added, AsyncModelRunnerOutput) else added
        assert getattr(found, FIELD) == ["b"]
        assert found.sampled_token_ids == [[5], []]


def test_a_step_of_a_prompt_has_no_tokens():
    output = ModelRunnerOutput(["a"], {"a": 0})
    assert getattr(Marks(torch.ones(2, dtype=torch.int32)).added_to(output), FIELD) == ["a"]


def test_steps_without_requests_or_without_output_stay_as_they_are() -> None:
    marks = torch.ones(2, dtype=torch.int32)
    assert Marks(marks).added_to(None) is None
    Marks(marks).added_to(EMPTY_MODEL_RUNNER_OUTPUT)
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, FIELD)


def test_the_next_step_may_begin_before_the_output_is_read_and_marks_of_the_one_before_are_gone() -> None:
    marks = torch.tensor([0, 1], dtype=torch.int32)
    later = Marks(marks).added_to(Later())
    marks.zero_()
    assert getattr(later.get_output(), FIELD) == ["b"]
    assert not hasattr(Marks(marks).added_to(of_two()), FIELD)
