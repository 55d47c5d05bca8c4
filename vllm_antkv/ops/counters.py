"""What the operations count about themselves: cheap enough to be always on, read only when somebody asks.

Rows that are only known on the device are added up there, in place; nothing waits for the device until `report`.
Imports no vLLM.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import ClassVar, TypedDict

import torch

#: Names of what is timed, in the order of a step.
OPERATIONS = ("encode_store", "anchor_score", "attend")
#: Classes of rows that attention goes to: exact by position, corrected as anchors, decoded from codes.
ROW_CLASSES = ("recent", "anchors", "codes")


class OperationReport(TypedDict):
    """How often an operation ran, and for how long."""

    calls: int
    seconds: float


class Report(TypedDict):
    """What a worker did since it started; plain values, so that it can be sent between processes.

    implementation: names of the kernels that run, with + between them where layers have different ones.
    steps: engine steps.
    tokens_stored: tokens written to the cache, recomputed and rejected ones included.
    anchors_chosen: tokens whose row took an anchor row when their block closed; the mean over KV heads, K and V. A
        block closes once more where the draft that filled it was rejected.
    sinks_found: tokens that KVSink flagged.
    sampled_attention: sums of the sampled shares of attention, of `recent`, `anchors` and `codes`.
    operations: by name; none on a GPU, where launches are replayed from CUDA graphs without a call, and measuring would
        wait for the device.
    """

    implementation: str
    steps: int
    tokens_stored: int
    anchors_chosen: float
    sinks_found: int
    sampled_attention: dict[str, float]
    operations: dict[str, OperationReport]


def merged(stages: list[Report]) -> Report:
    """Of the stages of a pipeline: the last one knows all sinks, and each has attended in its own layers."""
    last = stages[-1]
    names = (name for stage in stages for name in stage["implementation"].split("+"))
    return {
        **last,
        "implementation": "+".join(dict.fromkeys(names)),
        "sampled_attention": {
            rows: sum(stage["sampled_attention"][rows] for stage in stages) for rows in last["sampled_attention"]
        },
        "operations": {
            name: OperationReport(
                calls=sum(stage["operations"][name]["calls"] for stage in stages),
                seconds=sum(stage["operations"][name]["seconds"] for stage in stages),
            )
            for name in last["operations"]
        },
    }


class Timing(ctypes.Structure):
    """How often an operation ran, and for how long; antkv_timing of csrc/cpu/antkv.h."""

    _fields_: ClassVar = [("calls", ctypes.c_int64), ("seconds", ctypes.c_double)]


class Counters:
    """Counts of one worker. Its layers share them; one layer's rows stand for all layers' rows.

    max_num_reqs: the most requests of a step.

    timings: of `OPERATIONS`, for kernels that add to them themselves.
    missing_rows: (max_num_reqs,) int32, by the requests' places in the step: not 0 for one that reads a row in full
        precision whose recency page is the null block. That is a bug of whoever allocates pages. Every kernel takes
        zeros for such a row, in attention and for anchors alike, and sets this; the request must end with an error.
    """

    def __init__(self, device: torch.device, implementation: str, max_num_reqs: int) -> None:
        self.missing_rows = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.timings = (Timing * len(OPERATIONS))()
        self._implementation = implementation
        # On other devices the host only queues the work, and its clock would time the queueing.
        self._host_computes = device.type == "cpu"
        self._steps = 0
        self._tokens = 0
        self._sinks = torch.zeros((), dtype=torch.int64, device=device)
        self._anchor_rows = torch.zeros((), dtype=torch.int64, device=device)
        self._rows_per_token = 1
        self._attention = torch.zeros(len(ROW_CLASSES), dtype=torch.float64, device=device)
        self._timings = dict(zip(OPERATIONS, self.timings, strict=True))

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Count a call of `operation` and its time."""
        timing, start = self._timings[operation], perf_counter()
        yield
        timing.seconds += perf_counter() - start
        timing.calls += 1

    def count_step(self, num_tokens: int) -> None:
        """Count a step and its tokens."""
        self._steps += 1
        self._tokens += num_tokens

    def count_sinks(self, is_sink: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Count the sinks of a step: (rows,) bool, of which the first `num_tokens`, () int, are tokens; others pad."""
        self._sinks += (is_sink & (torch.arange(len(is_sink), device=is_sink.device) < num_tokens)).sum()

    def count_anchors(self, offsets: torch.Tensor) -> None:
        """Count the K, or the V, anchors of blocks that close: (..., num_kv_heads, rows), negative if unused."""
        self.count_anchor_rows((offsets >= 0).sum(), 2 * offsets.shape[-2])

    def count_anchor_rows(self, num_rows: torch.Tensor | int, rows_per_token: int) -> None:
        """Count anchor rows of K and V, of which a token takes `rows_per_token`: two per KV head."""
        self._rows_per_token = rows_per_token
        self._anchor_rows += num_rows

    def anchor_rows(self, rows_per_token: int) -> torch.Tensor:
        """Where kernels add what `count_anchor_rows` is given, () int64."""
        self._rows_per_token = rows_per_token
        return self._anchor_rows

    def count_attention(self, shares: torch.Tensor) -> None:
        """Add a sample: (3,) shares of the attention, in the order of ROW_CLASSES."""
        self._attention += shares

    def report(self) -> Report:
        """Read everything; waits for the device."""
        return Report(
            implementation=self._implementation,
            steps=self._steps,
            tokens_stored=self._tokens,
            anchors_chosen=int(self._anchor_rows) / self._rows_per_token,
            sinks_found=int(self._sinks),
            sampled_attention=dict(zip(ROW_CLASSES, self._attention.tolist(), strict=True)),
            operations={
                name: OperationReport(calls=timing.calls, seconds=timing.seconds)
                for name, timing in self._timings.items()
                if self._host_computes
            },
        )
