"""Machine code of compute capability 9.0 as `nvdisasm -c -hex -g` prints it, with its control codes."""

import re
from dataclasses import dataclass, field
from functools import cached_property

_HEADING = re.compile(r"\s*\.section\s+\.text\.([\w$]+)")
_LABEL = re.compile(r"(\.L_x_\d+|\$[\w$]+):")
_SOURCE = re.compile(r'//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,6})\*/\s+(.*?);?\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND_WORD = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_PREDICATED = re.compile(r"@(!?)(U?P)([T\d])\s+(.*)")


@dataclass
class Instruction:
    """stall: cycles until the warp may issue again. wait: mask of the scoreboards that it waits for.

    write_barrier, read_barrier: scoreboard (0 to 5) that it holds until its result is there, and until it has read its
    operands; 7 is none.
    """

    address: int
    operation: str
    operands: tuple[str, ...]
    predicate: tuple[bool, bool, int] | None  # negated, uniform, number (7: true)
    source: tuple[str, int]
    stall: int
    write_barrier: int
    read_barrier: int
    wait: int
    text: str

    @cached_property
    def name(self) -> str:
        """Without modifiers."""
        return self.operation.split(".")[0]

    @cached_property
    def modifiers(self) -> frozenset[str]:
        """What stands behind the name."""
        return frozenset(self.operation.split(".")[1:])

    @cached_property
    def never_runs(self) -> bool:
        """What the compiler puts in to separate others."""
        return self.predicate == (True, False, 7)


@dataclass
class Function:
    """labels: position in `code`."""

    name: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def target(self, operand: str) -> int:
        """Position that a branch leads to."""
        return self.labels[operand.strip("`()")]


def parse(listing: str) -> dict[str, Function]:
    """The functions of a listing, by name."""
    functions: dict[str, Function] = {}
    current: Function | None = None
    source, pending = ("", 0), None
    for line in listing.splitlines():
        if match := _HEADING.match(line):
            current = functions.setdefault(match[1], Function(match[1]))
        elif line.startswith("\t.section"):
            current = None
        if current is None:
            continue
        if match := _LABEL.match(line):
            current.labels[match[1]] = len(current.code)
        elif match := _SOURCE.search(line):
            source = (match[1].rsplit("/", 1)[-1], int(match[2]))
        elif match := _INSTRUCTION.match(line):
            pending = match
        elif pending and (match := _SECOND_WORD.match(line)):
            current.code.append(_instruction(pending, int(match[1], 16) >> 41, source))
            pending = None
    return functions


def _instruction(match: re.Match[str], control: int, source: tuple[str, int]) -> Instruction:
    text = match[2].strip().rstrip(";").strip()
    predicate, body = None, text
    if found := _PREDICATED.match(text):
        predicate = (found[1] == "!", found[2] == "UP", 7 if found[3] == "T" else int(found[3]))
        body = found[4]
    operation, _, rest = body.partition(" ")
    operands = tuple(part.strip().replace(".reuse", "") for part in rest.split(",")) if rest else ()
    return Instruction(
        address=int(match[1], 16),
        operation=operation,
        operands=operands,
        predicate=predicate,
        source=source,
        stall=control & 15,
        write_barrier=control >> 5 & 7,
        read_barrier=control >> 8 & 7,
        wait=control >> 11 & 63,
        text=text,
    )
