"""Loops in the machine code of a Triton kernel, to count the instructions of a turn."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Loop(NamedTuple):
    """Addresses of its first and last instruction; instructions are 16 bytes."""

    first: int
    last: int

    @property
    def instructions(self) -> int:
        """Of one turn that branches over nothing."""
        return (self.last - self.first) // 16 + 1


def nested_loops(cubin: bytes) -> tuple[Loop, Loop] | None:
    """The outer and the inner loop of a kernel's nested loops; None where there are none.

    Blocks that the compiler moves out of the way branch back as loops do. The pair that is meant has the longest inner
    loop, and the shortest outer one around it.
    """
    loops = _loops(_disassembled(cubin))
    pairs = [(o, i) for o in loops for i in loops if o.first <= i.first and i.last <= o.last and o != i]
    return max(pairs, key=lambda pair: (pair[1].instructions, -pair[0].instructions), default=None)


def _disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "nvdisasm"), "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _loops(listing: str) -> list[Loop]:
    """One for each target of branches backwards, to the last of them; not the trap behind the end of a kernel."""
    labels: dict[str, int | None] = {}
    branches: list[tuple[int, str]] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = None
        elif instruction := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*)", line):
            address = int(instruction[1], 16)
            labels = {name: address if at is None else at for name, at in labels.items()}
            if branch := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction[2]):
                branches.append((address, branch[1]))
    ends: dict[int, int] = {}
    for at, name in branches:
        target = labels[name]
        if target is not None and target < at:
            ends[target] = max(at, ends.get(target, 0))
    return [Loop(first, last) for first, last in ends.items()]
