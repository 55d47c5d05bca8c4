"""What the model of a multiprocessor takes for granted: cycles, and what a pipe does in one.

`research.gpu_constants` measured some on an H200; `measured` reads its figures of another GPU.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Constants:
    """In cycles. Latencies: from issue to result. Intervals: between two issues of a scheduler."""

    #: Measured on an H200.
    l1_latency: float = 40
    l2_latency: float = 374
    dram_latency: float = 667
    shared_latency: float = 23
    shuffle_latency: float = 21
    constant_latency: float = 30
    special_latency: float = 22
    variable_latency: float = 24
    #: Measured on an H200: 66% of what wgmma reaches on paper.
    mma_interval: float = 6.2
    #: 16 lanes of integers and 32 of float32 a cycle (CUDA programming guide, arithmetic throughput).
    alu_interval: float = 2
    fma_interval: float = 1
    imad_interval: float = 2
    #: Measured on an H200. The guide has 256 results a cycle and multiprocessor for half2, which is an interval of 1.
    half_interval: float = 2.1
    special_interval: float = 8
    #: Lines of 128 bytes that L1 looks up in a cycle, of which loads of global memory touch one per lane at worst;
    #: measured on an H200.
    l1_lines: float = 1
    #: Of shared memory: a wavefront of 128 bytes a cycle.
    #: Bytes a cycle and multiprocessor when all ask: L2 for random sectors, DRAM for pages; measured on an H200.
    l2_bytes: float = 19.7
    dram_bytes: float = 14.1
    #: From the last arrival at a barrier to the next instruction.
    barrier_latency: float = 20
    #: Bytes of L1 and shared memory together.
    l1_and_shared: int = 256 * 1024


def measured(path: Path | None) -> Constants:
    """The constants, with those in their place that a file of `research/gpu_constants.py` has.

    Raises:
        ValueError: the file has none.
    """
    if path is None:
        return Constants()
    known = {field.name for field in fields(Constants)}
    found = {name: value for name, value in json.loads(path.read_text()).get("constants", {}).items() if name in known}
    if not found:
        raise ValueError(f"{path} has no constants: run `python -m research.gpu_constants --json FILE` on a GPU.")
    return Constants(**{**vars(Constants()), **found})
