"""What a warp holds, and the operands of its instructions: 32 lanes at once, as arrays of 32-bit words."""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LANES = 32
ALL = (1 << LANES) - 1
LANE = np.arange(LANES, dtype=np.uint32)

Words = np.ndarray  # (32) uint32
Reader = Callable[["Warp"], Words]


@dataclass
class Group:
    """Lanes that go on together from `position`; `meets`: they wait there for the others of this mask."""

    position: int
    mask: int
    meets: int | None = None


@dataclass(eq=False)
class Warp:
    """registers: (256, 32). predicates: (8, 32), the last true. Uniform ones are Python numbers."""

    number: int
    cta: Any
    registers: np.ndarray = field(default_factory=lambda: np.zeros((256, LANES), np.uint32))
    predicates: np.ndarray = field(default_factory=lambda: np.zeros((8, LANES), bool))
    uniform: list[int] = field(default_factory=lambda: [0] * 64)
    uniform_predicates: list[bool] = field(default_factory=lambda: [False] * 7 + [True])
    barriers: dict[str, int] = field(default_factory=dict)  # masks, of divergent code
    local: dict[int, Words] = field(default_factory=dict)  # spilled words
    groups: list[Group] = field(default_factory=lambda: [Group(0, ALL)])
    live: int = ALL

    def __post_init__(self) -> None:
        self.predicates[7] = True

    @property
    def running(self) -> Group:
        """The lanes whose turn it is; the first that do not wait."""
        return next(group for group in self.groups if group.meets is None)


def lanes_of(mask: int) -> np.ndarray:
    """(32) bool."""
    return (np.uint32(mask) >> LANE & 1).astype(bool)


def mask_of(lanes: np.ndarray) -> int:
    return int(np.packbits(lanes, bitorder="little").view(np.uint32)[0])


def number(text: str) -> int:
    """Of a register; RZ and URZ are 255 and 63."""
    digits = text.lstrip("UR")
    return (63 if text.startswith("U") else 255) if digits.startswith("Z") else int(digits)


def is_register(text: str) -> bool:
    return re.fullmatch(r"U?R(\d+|Z)", text) is not None


def is_predicate(text: str) -> bool:
    return re.fullmatch(r"!?U?P(\d|T)", text) is not None


def immediate(text: str, floats: bool) -> int:
    """Bits of a constant in the code; `floats` where the instruction takes float32."""
    if text.lstrip("-").startswith("0x"):
        return int(text, 16) & 0xFFFFFFFF
    if not floats:
        return int(text) & 0xFFFFFFFF
    value = {"+INF": np.inf, "-INF": -np.inf, "+QNAN": np.nan, "-QNAN": np.nan}.get(text)
    return struct.unpack("<I", struct.pack("<f", float(text) if value is None else value))[0]


def words(text: str, floats: bool = False) -> Reader:
    """Reads an operand without its sign: a register, a constant of the code or of the launch."""
    if text.startswith("c["):
        bank, offset = (int(part, 16) for part in re.findall(r"\[(0x[0-9a-f]+)\]", text))
        return lambda warp: _broadcast(warp.cta.constant(bank, offset))
    if is_register(text):
        index = number(text)
        if text.startswith("U"):
            return lambda warp: _broadcast(warp.uniform[index])
        return (lambda warp: warp.registers[index]) if index != 255 else (lambda warp: _ZEROS)
    constant = _broadcast(immediate(text, floats))
    return lambda warp: constant


def integer(text: str) -> tuple[Reader, bool, bool]:
    """A reader, and whether the operand is negated (-) and inverted (~)."""
    sign = text[0] if text[0] in "-~" and not text[1:2].isdigit() else ""
    return words(text[len(sign) :]), sign == "-", sign == "~"


def real(text: str) -> Callable[[Warp], np.ndarray]:
    """Reads a float32 operand with its sign and its bars."""
    sign = -1.0 if re.match(r"-(R|\||UR|c)", text) else 1.0
    bare = text[1:] if sign < 0 else text
    absolute = bare.startswith("|")
    read = words(bare.strip("|"), floats=True)

    def value(warp: Warp) -> np.ndarray:
        number = read(warp).view(np.float32)
        number = np.abs(number) if absolute else number
        return -number if sign < 0 else number

    return value


def predicate(text: str) -> Callable[[Warp], np.ndarray]:
    """Reads a predicate: (32) bool."""
    negated, name = text.startswith("!"), text.lstrip("!")
    index = 7 if name.endswith("T") else int(name[-1])
    if name.startswith("U"):
        return lambda warp: np.full(LANES, warp.uniform_predicates[index] != negated)
    return lambda warp: ~warp.predicates[index] if negated else warp.predicates[index]


_ZEROS = np.zeros(LANES, np.uint32)


def _broadcast(value: int) -> Words:
    return np.full(LANES, value & 0xFFFFFFFF, np.uint32)
