"""The requests of a step one by one, for what goes through them in Python."""

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.step import StepPlan


@dataclass(frozen=True)
class StepRequest:
    """A request's part of a step: tokens `start .. end` of its sequence are rows `first ...` of the step's tensors.

    row: of the block tables.
    is_prefilling: the tokens are of its prompt.
    """

    row: int
    first: int
    start: int
    end: int
    is_prefilling: bool

    def rows(self, begin: int, end: int) -> slice:
        """Rows of tokens `begin .. end`, which are in hand."""
        return slice(self.first + begin - self.start, self.first + end - self.start)

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """`(block, begin, end)` of the runs of new tokens that lie in one VQ block."""
        for block in range(self.start // VQ_BLOCK_SIZE, -(-self.end // VQ_BLOCK_SIZE)):
            first = block * VQ_BLOCK_SIZE
            yield block, max(first, self.start), min(first + VQ_BLOCK_SIZE, self.end)


def step_requests(step: StepPlan) -> Iterator[StepRequest]:
    """Those of a step that have new tokens."""
    starts = step.query_start_loc.tolist()
    for row, end in enumerate(step.seq_lens.tolist()):
        num_new = starts[row + 1] - starts[row]
        if num_new:
            prefilling = step.is_prefilling is not None and bool(step.is_prefilling[row])
            yield StepRequest(row, starts[row], end - num_new, end, prefilling)
