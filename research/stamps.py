"""Where the time of antkv_decode goes, as its own warps see it: kernels built with stamps (csrc/cuda/stamps.cuh).

On a GPU, in the model of a multiprocessor, or emulated: whatever runs the kernels.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from vllm_antkv.ops.cuda_arguments import ResultsArgument
from vllm_antkv.ops.cuda_backend import Argument, Backend
from vllm_antkv.ops.cuda_build import Build

#: What begins with a stamp, in the order of the kernel's `Phase`: once a CTA, with every span, with every split;
#: then what the bringing warp does.
PHASES = (
    "start",
    "tables",
    "angles",
    "wait for a span",
    "logits of codes",
    "kept keys",
    "weights",
    "kept values",
    "values of codes",
    "merge of warps",
    "bringing: beginning of a split",
    "bringing: wait for room",
    "bringing: a span",
    "bringing: votes",
    "end",
)
#: Of a CTA, before the first span has come.
START_UP = ("start", "tables", "angles", "first span")
#: CTAs that write stamps, and how many of each warp are kept.
_BLOCKS, _STAMPS = 4, 256


class StampedBackend:
    """See `Backend`: another one with stamps in its kernels.

    stamps: (CTAs, warps, stamps) int64 of the last launch of antkv_decode; 0 where there are fewer.
    """

    def __init__(self, inner: Backend, device: str) -> None:
        self._inner, self._device = inner, device
        self.multiprocessors, self.shared_bytes = inner.multiprocessors, inner.shared_bytes
        self.capability, self.clusters = inner.capability, inner.clusters
        self.stamps = torch.zeros(0, dtype=torch.int64)

    def load(self, build: Build) -> None:
        """See `Backend`."""
        self._inner.load(replace(build, stamps=True))

    def launch(
        self, build: Build, kernel: str, grid: tuple[int, ...], threads: int, shared: int, arguments: Sequence[Argument]
    ) -> None:
        """See `Backend`."""
        results = arguments[-1]
        if kernel == "antkv_decode" and isinstance(results, ResultsArgument):
            shape = _BLOCKS, build.decode_threads // 32, _STAMPS
            self.stamps = torch.zeros(shape, dtype=torch.int64, device=self._device)
            results.stamps = self.stamps.data_ptr()
        self._inner.launch(replace(build, stamps=True), kernel, grid, threads, shared, arguments)


def cycles_of(stamps: torch.Tensor) -> dict[str, float]:
    """Mean cycles of a warp by what it did: of the start once, of the rest per time that it did it.

    The first wait for a span is `first span`, apart from the others.
    """
    total: dict[str, float] = defaultdict(float)
    times: dict[str, int] = defaultdict(int)
    for row in stamps.flatten(0, 1).tolist():
        marks = [(word >> 8, PHASES[(word & 0xFF) - 1]) for word in row if word]
        for at, ((begin, phase), (end, _)) in enumerate(pairwise(marks)):
            name = "first span" if phase == "wait for a span" and at < len(START_UP) else phase
            total[name] += end - begin
            times[name] += 1
    return {name: total[name] / times[name] for name in (*START_UP, *PHASES) if times[name]}
