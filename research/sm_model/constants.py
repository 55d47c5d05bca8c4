"""What the model of a multiprocessor takes for granted: cycles, and what a pipe does in one.

None of it was measured on this project's kernels; `research.gpu_constants` measures what can be, and `measured`
reads its figures.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Constants:
    """Of an H100 SXM, in cycles. Latencies: from issue to result. Intervals: between two issues of a scheduler."""

    #: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (2024): L1 40, L2 260 to 280.
    l1_latency: float = 40
    l2_latency: float = 280
    #: The same: 470 to 500 alone; under load more. Figures of this model move by 10% between 500 and 900.
    dram_latency: float = 700
    shared_latency: float = 23
    shuffle_latency: float = 21
    constant_latency: float = 30
    special_latency: float = 22
    variable_latency: float = 24
    #: 512 dense half-precision FMA a cycle and scheduler on paper through wgmma: 4 cycles for m16n8k16. mma.sync
    #: reaches some 62% of that (the same paper).
    mma_interval: float = 6
    #: 16 lanes of integers and 32 of float32 a cycle (CUDA programming guide, arithmetic throughput).
    alu_interval: float = 2
    fma_interval: float = 1
    imad_interval: float = 2
    #: The guide has 256 results a cycle and multiprocessor for half2, which is an interval of 1; kernels show 2.
    half_interval: float = 2
    special_interval: float = 8
    #: Lines of 128 bytes that L1 looks up in a cycle, of which loads of global memory touch one per lane at worst. An
    #: engineer of NVIDIA's on Volta: https://forums.developer.nvidia.com/t/pascal-l1-cache/49571/14
    l1_lines: float = 4
    #: Of shared memory: a wavefront of 128 bytes a cycle.
    #: Bytes a cycle and multiprocessor when all ask: L2 for random sectors, and 3.35 TB/s of an H100 at 1.755 GHz.
    l2_bytes: float = 24
    dram_bytes: float = 14.4
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
