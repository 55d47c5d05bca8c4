"""Hands on which requests of a step lack rows, with the step's sampled tokens, none of which they get.

Kernels mark them on the device (`ops.counters`). The marks come to the host behind the step's forward pass, as the
tokens do: nothing waits for them that does not wait for those. `hooks.missing_rows` then ends the requests. In a
pipeline the layers of the last stage decide.
"""

from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

#: Of a ModelRunnerOutput: the requests that lack rows, if any does.
FIELD = "antkv_requests_without_rows"


class Marks:
    """A step's `Counters.missing_rows`, (max_num_reqs,) int32, on their way to the host.

    Made when the step is computed, or queued on the device.
    """

    def __init__(self, marks: torch.Tensor) -> None:
        self._on_host = marks.to("cpu", copy=True, non_blocking=True)
        self._arrived = None
        if marks.is_cuda:
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()

    def added_to(self, output: Any) -> Any:
        """The output of the step's sampling, of any kind that vLLM has, with `FIELD` where a request lacks rows."""
        if isinstance(output, AsyncModelRunnerOutput):
            return _Later(output, self)
        return self._added(output) if isinstance(output, ModelRunnerOutput) else output

    def _added(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = self._on_host[: len(output.req_ids)].nonzero().flatten().tolist()
        if rows:
            setattr(output, FIELD, [output.req_ids[row] for row in rows])
            for row in rows if output.sampled_token_ids else ():
                output.sampled_token_ids[row] = []
        return output


class _Later(AsyncModelRunnerOutput):
    """An output that is still computed."""

    def __init__(self, output: AsyncModelRunnerOutput, marks: Marks) -> None:
        self._output, self._marks = output, marks

    def get_output(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = self._marks._added(self._output.get_output())
        return output

    def get_kv_connector_output(self) -> Any:
        """Of vLLM 0.33."""
        return self._output.get_kv_connector_output()  # type: ignore[attr-defined]
