"""Executes machine code: one instruction of a warp at a time, on real data.

`Machine.step` does what an instruction does and says what the model of its time needs to know: which memory it touched,
whether the warp now waits for others.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from research.sm_model.arithmetic import MAKERS, Compute
from research.sm_model.memory import SHARED_WINDOW, GenericMemory, GlobalMemory, SharedMemory
from research.sm_model.sass import Function, Instruction
from research.sm_model.state import (
    ALL,
    LANE,
    LANES,
    Group,
    Warp,
    is_predicate,
    lanes_of,
    mask_of,
    number,
    predicate,
    words,
)

Memory = GlobalMemory | SharedMemory | GenericMemory

#: Where the parameters of a launch lie in constant bank 0.
PARAMETERS = 0x210


@dataclass
class Effect:
    """Of one instruction.

    addresses, width: touched by the active lanes, bytes each; empty where there are none. bulk: bytes of a bulk copy.
    barrier: the shared address of the barrier that it concerns. meets: name and number of threads of the meeting (BAR)
    that the warp has come to. waits: the phase of the barrier that it asks for is not over.
    """

    addresses: np.ndarray | None = None
    width: int = 0
    bulk: int = 0
    barrier: int | None = None
    meets: tuple[int, int] | None = None
    waits: bool = False


@dataclass
class Phases:
    """An mbarrier: arrivals and bytes that its current phase lacks; phases that are over."""

    arrivals: int
    missing: int
    num_bytes: int = 0
    completed: int = 0

    def end_if_complete(self) -> None:
        """Begin the next phase when nothing lacks."""
        if self.missing == 0 and self.num_bytes == 0:
            self.missing = self.arrivals
            self.completed += 1


@dataclass
class Cta:
    """What a launch hands to a CTA. parameters: bytes from `PARAMETERS` on."""

    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    threads: int
    shared: SharedMemory
    memory: GlobalMemory
    parameters: bytes
    barriers: dict[int, Phases] = field(default_factory=dict)
    clock: int = 0

    @cached_property
    def generic(self) -> GenericMemory:
        """What LD and ST reach."""
        return GenericMemory(self.memory, self.shared)

    def constant(self, bank: int, offset: int) -> int:
        """A word of the constant banks."""
        at = offset - PARAMETERS
        if bank == 0 and at >= 0 and at + 4 <= len(self.parameters):
            return int.from_bytes(self.parameters[at : at + 4], "little")
        geometry = (self.threads, 1, 1, *self.grid)
        if bank == 0 and offset < 0x18:
            return geometry[offset // 4]
        return 0x10000 if (bank, offset) == (0, 0x28) else 0  # the stack; descriptors


class Machine:
    """Runs a function. One instruction is decoded once, into a Python function."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._steps: list[Callable[[Warp, Group, np.ndarray], Effect | None]] = []
        for position, instruction in enumerate(function.code):
            self._steps.append(self._decode(position, instruction))
        self._guards = [None if i.predicate is None else predicate(_guard(i)) for i in function.code]

    def step(self, warp: Warp) -> Effect | None:
        """Execute the next instruction of the lanes whose turn it is."""
        group = warp.running
        position = group.position
        active = _LANES_ALL if group.mask == ALL else lanes_of(group.mask)
        guard = self._guards[position]
        if guard is not None:
            active = active & guard(warp)
        group.position = position + 1
        return self._steps[position](warp, group, active)

    def _decode(self, position: int, i: Instruction) -> Callable[[Warp, Group, np.ndarray], Effect | None]:
        if i.name in MAKERS:
            return _arithmetic(i, MAKERS[i.name](i))
        maker = getattr(self, f"_{_ALIASES.get(i.name, i.name).lower()}", None)
        if maker is None:
            return _unknown(i)
        return maker(i, position)

    # --- Control flow.

    def _bra(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        target = self.function.target(i.operands[-1])
        condition = predicate(i.operands[0]) if is_predicate(i.operands[0]) else None

        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            if "DIV" in i.modifiers:
                if group.mask == warp.live:
                    return
                active = _LANES_ALL
            if condition is not None:
                active = active & condition(warp)
            leaving = mask_of(active) & group.mask
            if "ANY" in i.modifiers and leaving:  # all together
                leaving = group.mask
            _jump(warp, group, leaving, target)

        return step

    def _exit(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            leaving = mask_of(active) & group.mask
            warp.live &= ~leaving
            group.mask &= ~leaving
            _settle(warp)

        return step

    def _bssy(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            warp.barriers[i.operands[0]] = group.mask

        return step

    def _bsync(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            group.meets = warp.barriers[i.operands[0]]
            _settle(warp)

        return step

    def _break(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            warp.barriers[i.operands[-1]] &= ~mask_of(active)
            _settle(warp)

        return step

    def _warpsync(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            group.meets = ALL
            _settle(warp)

        return step

    def _call(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        target = self.function.target(i.operands[-1])
        return lambda warp, group, active: _jump(warp, group, mask_of(active) & group.mask, target)

    def _ret(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        places = {instruction.address: n for n, instruction in enumerate(self.function.code)}
        register = int(i.operands[0].split(" ")[0][1:])

        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            lane = int(np.flatnonzero(active)[0])
            _jump(warp, group, mask_of(active) & group.mask, places[int(warp.registers[register][lane])])

        return step

    def _nop(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        return lambda warp, group, active: None

    def _bar(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect | None]:
        name = words(i.operands[0])
        count = words(i.operands[1]) if len(i.operands) > 1 else None

        def step(warp: Warp, group: Group, active: np.ndarray) -> Effect | None:
            if group.mask != warp.live:  # a warp meets others when all of its lanes have come
                group.position, group.meets = position, ALL
                _settle(warp)
                return None
            threads = warp.cta.threads if count is None else int(count(warp)[0])
            return Effect(meets=(int(name(warp)[0]), threads))

        return step

    # --- Registers from elsewhere.

    def _s2r(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        def value(warp: Warp) -> np.ndarray:
            cta = warp.cta
            known = {
                "SR_TID.X": warp.number * LANES + LANE,
                "SR_LANEID": LANE,
                "SRZ": LANE * 0,
                "SR_CgaCtaId": LANE * 0,
                "SR_SWINHI": LANE * 0 + SHARED_WINDOW,
                "SR_CLOCKLO": LANE * 0 + cta.clock,
                **{f"SR_CTAID.{axis}": LANE * 0 + cta.block[n] for n, axis in enumerate("XYZ")},
                **{f"SR_NCTAID.{axis}": LANE * 0 + cta.grid[n] for n, axis in enumerate("XYZ")},
            }
            result = known[i.operands[1]].astype(np.uint32)
            return np.stack((result, result * 0)) if i.name == "CS2R" and "32" not in i.modifiers else result

        return _arithmetic(i, value)

    def _ldc(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        count = 2 if "64" in i.modifiers else 4 if "128" in i.modifiers else 1
        bank, place = re.findall(r"\[([^\]]+)\]", i.operands[1])
        address = _address(place)

        def value(warp: Warp) -> np.ndarray:
            offsets = address(warp)
            return np.array(
                [[warp.cta.constant(int(bank, 16), int(at) + 4 * n) for at in offsets] for n in range(count)], np.uint32
            )

        return _arithmetic(i, value)

    def _vote(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        condition = predicate(i.operands[-1])
        result = next((text for text in i.operands if not is_predicate(text)), None)
        output = next((text for text in i.operands[:-1] if is_predicate(text)), "PT")

        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            votes = mask_of(condition(warp) & active)
            verdict = votes == mask_of(active) if "ALL" in i.modifiers else bool(votes)
            if result is not None:
                _store(warp, result, np.full(LANES, votes, np.uint32), active)
            _store_predicate(warp, output, np.full(LANES, verdict), active)

        return step

    def _elect(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            first = np.arange(LANES) == np.flatnonzero(active)[0]
            _store_predicate(warp, next(text for text in i.operands if is_predicate(text)), first, active)

        return step

    def _p2r(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        into, kept, mask = i.operands[0], words(i.operands[-2]), words(i.operands[-1])

        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            bits = sum((warp.predicates[n].astype(np.uint32) << np.uint32(n) for n in range(7)), LANE * 0)
            chosen = mask(warp)
            _store(warp, into, ((bits & chosen) | (kept(warp) & ~chosen)).astype(np.uint32), active)

        return step

    def _r2p(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], None]:
        bits, mask = words(i.operands[1]), words(i.operands[2])

        def step(warp: Warp, group: Group, active: np.ndarray) -> None:
            for n in range(7):
                if int(mask(warp)[0]) >> n & 1:
                    warp.predicates[n] = np.where(active, bits(warp) >> np.uint32(n) & 1 != 0, warp.predicates[n])

        return step

    # --- Memory.

    def _lds(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect]:
        return _load(i, _address(_inside(i.operands[1])), lambda warp: warp.cta.shared)

    def _ldg(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect]:
        if i.name == "LD":
            return _load(i, _address(_inside(i.operands[1])), lambda warp: warp.cta.generic)
        return _load(i, _address(_inside(i.operands[1])), lambda warp: warp.cta.memory)

    def _sts(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect]:
        return _save(i, _address(_inside(i.operands[0])), lambda warp: warp.cta.shared)

    def _stg(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect]:
        if i.name == "ST":
            return _save(i, _address(_inside(i.operands[0])), lambda warp: warp.cta.generic)
        return _save(i, _address(_inside(i.operands[0])), lambda warp: warp.cta.memory)

    def _redg(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect]:
        if not {"ADD", "F32"} <= i.modifiers:
            raise NotImplementedError(f"the model does not know {i.text}")
        address, more = _address(_inside(i.operands[0])), number(i.operands[1])

        def step(warp: Warp, group: Group, active: np.ndarray) -> Effect:
            addresses, memory = address(warp)[active], warp.cta.memory
            # Lanes may add to the same place.
            for at, x in zip(addresses, warp.registers[more][active].view(np.float32), strict=True):
                there = np.array([at], np.uint64)
                memory.write(there, (memory.read(there, 4).view(np.float32) + x).view(np.uint8))
            return Effect(addresses, 4)

        return step

    def _ldl(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect]:
        address, count = _address(_inside(i.operands[1])), _width(i) // 4

        def step(warp: Warp, group: Group, active: np.ndarray) -> Effect:
            at = int(address(warp)[0])
            _store(warp, i.operands[0], np.stack([warp.local[at + 4 * n] for n in range(count)]), active)
            return Effect(np.array([at], np.uint64), 4 * count)

        return step

    def _stl(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect]:
        address, count, first = _address(_inside(i.operands[0])), _width(i) // 4, number(i.operands[1])

        def step(warp: Warp, group: Group, active: np.ndarray) -> Effect:
            at = int(address(warp)[0])
            for n in range(count):
                before = warp.local.get(at + 4 * n, LANE * 0)
                value = LANE * 0 if first == 255 else warp.registers[first + n]
                warp.local[at + 4 * n] = np.where(active, value, before)
            return Effect(np.array([at], np.uint64), 4 * count)

        return step

    def _ldgsts(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect]:
        to, source, width = _address(_inside(i.operands[0])), _address(_inside(i.operands[1])), _width(i)

        def step(warp: Warp, group: Group, active: np.ndarray) -> Effect:
            if not active.any():
                return Effect(np.zeros(0, np.uint64), width)
            addresses = source(warp)[active]
            warp.cta.shared.write(to(warp)[active], warp.cta.memory.read(addresses, width))
            return Effect(addresses, width)

        return step

    def _ublkcp(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect | None]:
        # [UR to : its barrier in the next], [UR from (64 bits)], UR bytes
        to, source, count = number(_inside(i.operands[0])), number(_inside(i.operands[1])), number(i.operands[2])

        def step(warp: Warp, group: Group, active: np.ndarray) -> Effect | None:
            if not active.any():
                return None
            num_bytes = warp.uniform[count] << 4
            address = warp.uniform[source] | warp.uniform[source + 1] << 32
            data = warp.cta.memory.copy(address, num_bytes)
            at = warp.uniform[to]
            warp.cta.shared.write(np.arange(at, at + num_bytes, 16), data.reshape(-1, 16))
            first = np.arange(address, address + num_bytes, 32, dtype=np.uint64)
            return Effect(first, 32, bulk=num_bytes, barrier=warp.uniform[to + 1])

        return step

    def _syncs(self, i: Instruction, position: int) -> Callable[[Warp, Group, np.ndarray], Effect | None]:
        address = _address(next(_inside(text) for text in i.operands if text.startswith("[")))
        last = i.operands[-1]
        if "EXCH" in i.modifiers:
            register = number(last)

            def make(warp: Warp, group: Group, active: np.ndarray) -> Effect | None:
                if active.any():
                    count = 0x100000 - (warp.uniform[register] >> 1)
                    warp.cta.barriers[int(address(warp)[0])] = Phases(count, count)
                return Effect()

            return make
        operand = words(last)
        if "PHASECHK" in i.modifiers:
            output = i.operands[0]

            def ask(warp: Warp, group: Group, active: np.ndarray) -> Effect:
                lane = int(np.flatnonzero(active)[0])
                at = int(address(warp)[lane])
                over = warp.cta.barriers[at].completed & 1 != int(operand(warp)[lane]) >> 31
                if not over:
                    group.position = position  # the hardware waits for a while, too
                _store_predicate(warp, output, np.full(LANES, over), active)
                return Effect(barrier=at, waits=not over)

            return ask

        def arrive(warp: Warp, group: Group, active: np.ndarray) -> Effect | None:
            at = None
            for lane in np.flatnonzero(active):
                at = int(address(warp)[lane])
                phases = warp.cta.barriers[at]
                phases.missing -= "ART0" not in i.modifiers
                phases.num_bytes += 0 if "A1T0" in i.modifiers else int(operand(warp)[lane])
                phases.end_if_complete()
            return Effect(barrier=at)

        return arrive


#: Instructions that do what others do, as far as one CTA can tell.
_ALIASES = {
    **dict.fromkeys(("ULDC",), "LDC"),
    **dict.fromkeys(("S2UR", "CS2R"), "S2R"),
    **dict.fromkeys(("VOTEU",), "VOTE"),
    "LD": "LDG",
    "ST": "STG",
    "RED": "REDG",
    **dict.fromkeys(
        ("LDGDEPBAR", "DEPBAR", "ENDCOLLECTIVE", "MEMBAR", "FENCE", "ERRBAR", "CGAERRBAR", "CCTL", "YIELD", "FCHK"),
        "NOP",
    ),
    **dict.fromkeys(("USETMAXREG", "NANOSLEEP", "ARRIVES", "UCGABAR_ARV", "WARPGROUP"), "NOP"),
}
_LANES_ALL = np.ones(LANES, bool)


def _unknown(i: Instruction) -> Callable[[Warp, Group, np.ndarray], None]:
    def step(warp: Warp, group: Group, active: np.ndarray) -> None:
        raise NotImplementedError(f"the model does not know {i.text}")

    return step


def _guard(i: Instruction) -> str:
    assert i.predicate is not None
    negated, uniform, index = i.predicate
    return f"{'!' if negated else ''}{'U' if uniform else ''}P{'T' if index == 7 else index}"


def _arithmetic(i: Instruction, compute: Compute) -> Callable[[Warp, Group, np.ndarray], None]:
    outputs: list[str] = []
    for text in i.operands:
        if (is_predicate(text) and not text.startswith("!") and len(outputs) < 3) or not outputs:
            outputs.append(text)
        else:
            break
    target = next((text for text in i.operands[:2] if not is_predicate(text)), None)
    flags = [text for text in outputs if is_predicate(text)]
    if i.name in ("ISETP", "FSETP", "FCHK", "PLOP3", "UISETP", "UPLOP3"):
        target = None

    def step(warp: Warp, group: Group, active: np.ndarray) -> None:
        result = compute(warp)
        verdicts: list[np.ndarray] = []
        if isinstance(result, tuple):
            result, verdicts = result
        if target is not None and result is not None:
            _store(warp, target, result, active)
        for text, verdict in zip(flags, verdicts, strict=False):
            _store_predicate(warp, text, verdict, active)

    return step


def _store(warp: Warp, text: str, value: np.ndarray, active: np.ndarray) -> None:
    """Into a register, or as many as `value` has rows."""
    first = number(text)
    rows = value.reshape(-1, LANES)
    for n, row in enumerate(rows):
        if text.startswith("U"):
            if first != 63 and active.any():
                warp.uniform[first + n] = int(row[int(np.flatnonzero(active)[0])])
        elif first != 255:
            np.copyto(warp.registers[first + n], row, where=active)


def _store_predicate(warp: Warp, text: str, value: np.ndarray, active: np.ndarray) -> None:
    if text.endswith("T"):
        return
    if text.startswith("U"):
        if active.any():
            warp.uniform_predicates[int(text[-1])] = bool(value[int(np.flatnonzero(active)[0])])
    else:
        np.copyto(warp.predicates[int(text[-1])], value, where=active)


def _jump(warp: Warp, group: Group, leaving: int, target: int) -> None:
    """Lanes go elsewhere; those that stay go first."""
    if leaving == 0:
        return
    if leaving == group.mask:
        group.position = target
        return
    group.mask &= ~leaving
    warp.groups.insert(warp.groups.index(group) + 1, Group(target, leaving))


def _settle(warp: Warp) -> None:
    """Lanes that wait go on where all of those that they wait for have come."""
    warp.groups = [group for group in warp.groups if group.mask]
    for group in [g for g in warp.groups if g.meets is not None]:
        if group not in warp.groups:
            continue
        others = [g for g in warp.groups if g.meets is not None and g.position == group.position]
        together = 0
        for other in others:
            together |= other.mask
        assert group.meets is not None
        if group.meets & warp.live & ~together == 0:
            warp.groups = [g for g in warp.groups if g not in others]
            warp.groups.insert(0, Group(group.position, together))


def _inside(text: str) -> str:
    """`desc[UR8][R2.64+0x10]` or `[R3+UR4+0x10]`: what the address is the sum of."""
    return re.findall(r"\[([^\]]*)\]", text)[-1]


def _address(text: str) -> Callable[[Warp], np.ndarray]:
    """(32) uint64."""
    parts = text.split("+")
    fixed = sum(int(part, 16) for part in parts if re.fullmatch(r"-?0x[0-9a-f]+", part))
    registers = [part for part in parts if not re.fullmatch(r"-?0x[0-9a-f]+", part)]

    def value(warp: Warp) -> np.ndarray:
        total = np.full(LANES, fixed, np.int64).view(np.uint64)
        for text in registers:
            name, _, kind = text.partition(".")
            index, uniform = number(name), name.startswith("U")
            if index == (63 if uniform else 255):
                continue
            if uniform:
                word = warp.uniform[index] | (warp.uniform[index + 1] << 32 if kind == "64" else 0)
                total = total + np.uint64(word)
                continue
            low = warp.registers[index].astype(np.uint64)
            if kind == "64":
                low = low | warp.registers[index + 1].astype(np.uint64) << np.uint64(32)
            total = total + low
        return total

    return value


def _width(i: Instruction) -> int:
    for name, width in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("16", 2), ("U8", 1), ("S8", 1), ("8", 1)):
        if name in i.modifiers:
            return width
    return 4


def _load(
    i: Instruction, address: Compute, memory: Callable[[Warp], Memory]
) -> Callable[[Warp, Group, np.ndarray], Effect]:
    width, signed = _width(i), {"S16", "S8"} & i.modifiers
    never = i.never_runs

    def step(warp: Warp, group: Group, active: np.ndarray) -> Effect:
        if never or not active.any():
            return Effect(np.zeros(0, np.uint64), width)
        addresses = address(warp)[active]
        data = memory(warp).read(addresses, width)
        if width < 4:
            dtype = {1: np.uint8, 2: np.uint16}[width]
            small = np.ascontiguousarray(data).view(dtype)[:, 0]
            if signed:
                small = small.view({1: np.int8, 2: np.int16}[width])
            found = small.astype(np.int64).astype(np.uint32)[None]
        else:
            found = np.ascontiguousarray(data).view(np.uint32).T
        rows = np.zeros((len(found), LANES), np.uint32)
        rows[:, active] = found
        _store(warp, i.operands[0], rows, active)
        return Effect(addresses, width)

    return step


def _save(
    i: Instruction, address: Compute, memory: Callable[[Warp], Memory]
) -> Callable[[Warp, Group, np.ndarray], Effect]:
    width, first = _width(i), number(i.operands[1])
    count = max(width // 4, 1)

    def step(warp: Warp, group: Group, active: np.ndarray) -> Effect:
        if not active.any():
            return Effect(np.zeros(0, np.uint64), width)
        rows = [LANE * 0 if first == 255 else warp.registers[first + n] for n in range(count)]
        values = np.ascontiguousarray(np.stack(rows, -1)).view(np.uint8)[:, :width]
        addresses = address(warp)[active]
        memory(warp).write(addresses, values[active])
        return Effect(addresses, width)

    return step
