"""Launches a kernel as Triton does, and then as `triton_kernels.launch` does, at a driver that is not there.

A process of its own: the stand-in takes the driver's place for good.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaLauncher

from benchmarks.host.driver import driver
from vllm_antkv.triton_kernels.launch import Fixed, launch

#: The turn in which somebody has hung hooks into launches; where the launcher is handed them, and what they are told.
WATCHED, HOOKS = 2, slice(7, 10)


class Parts(NamedTuple):
    first: torch.Tensor
    stride: int
    second: torch.Tensor


class Sizes(NamedTuple):
    head_size: int
    soft_cap: float


@triton.jit(do_not_specialize=["count"])
def kernel(
    rows: Parts,
    fixed: Parts,
    count: tl.tensor,
    scale: tl.tensor,
    other: tl.tensor,
    shape: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Nothing: it is not compiled."""


def flat(arguments: Any) -> list[Any]:
    """Addresses in place of tensors."""
    if isinstance(arguments, tuple | list):
        return [value for each in arguments for value in flat(each)]
    return [arguments.data_ptr() if isinstance(arguments, torch.Tensor) else arguments]


def main() -> None:
    """Raises AssertionError where both ways differ."""
    driver()
    calls: list[tuple[Any, ...]] = []
    CudaLauncher.__call__ = lambda self, *arguments: calls.append((self, *arguments))
    memory = torch.zeros(4096, dtype=torch.float16)
    start = -memory.data_ptr() // 2 % 8
    aligned, shifted = memory[start:], memory[start + 1 :]
    fixed = Fixed(Parts(aligned, 16, aligned.view(torch.int16)))
    variants = [
        (Parts(first, stride, second), count, scale, other, Sizes(size, 0.5), width)
        for first in (aligned, shifted)
        for second in (aligned, aligned.view(torch.uint8))
        for stride in (1, 17, 32, 1 << 33)
        for count, scale in ((1, 0.5), (16, 1.0))
        for other in (memory, None, 16, True)
        for size, width in ((64, 1), (128, 1), (128, 2))
    ]
    launchers = set()
    for turn in range(WATCHED + 1):
        if turn == WATCHED:
            triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
        for rows, count, scale, other, shape, width in variants:
            made = kernel[(3, 2)](rows, fixed.argument, count, scale, other, shape, WIDTH=width, num_warps=4)
            launch(kernel, (3, 2), rows, fixed, count, scale, other, shape=shape, WIDTH=width, num_warps=4)
            triton_s, ours = calls[-2:]
            # The same compilation, the same sizes, and the same arguments; hooks where there are some.
            assert ours[0] is triton_s[0] is made.run, "another compilation"
            if turn == WATCHED:
                assert flat(ours[1:]) == flat(triton_s[1:])
            else:
                assert not turn or ours[HOOKS] == (None, None, None), "hooks of nobody"
                assert flat(ours[1:7] + ours[10:]) == flat(triton_s[1:7] + triton_s[10:])
            launchers.add(ours[0])
            if turn:
                assert not any(isinstance(each, torch.Tensor) for each in ours[-7:-2]), "Triton's way again"
    assert len(launchers) > 40
    print(f"{len(variants)} variants of {len(launchers)} compilations")


if __name__ == "__main__":
    main()
