"""The time of one CTA that has a multiprocessor to itself: four schedulers that issue what machine code allows.

Stall counts and scoreboards are the code's own. Every instruction is executed when it is issued, so branches and
addresses are those of the data.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from research.sm_model.cache import SECTOR, Hierarchy, sectors, shared_wavefronts
from research.sm_model.constants import Constants
from research.sm_model.machine import Cta, Effect, Machine
from research.sm_model.memory import is_shared
from research.sm_model.pipes import is_queued, kind, unit
from research.sm_model.sass import Instruction
from research.sm_model.state import Warp

_SCHEDULERS = 4
#: Accesses of a scheduler that the queue to memory holds.
_QUEUE = 8


@dataclass
class Report:
    """cycles of the CTA; instructions issued by kind, wavefronts of shared memory, sectors that passed L1, and how the
    schedulers spent their cycles (shares).

    By source line, from the addresses of every access: `conflicts`, wavefronts of shared memory beyond those that so
    many bytes need; `asked` and `fetched`, bytes that lanes load from global memory, and bytes of their sectors.
    """

    cycles: float = 0
    instructions: Counter[str] = field(default_factory=Counter)
    wavefronts: int = 0
    sectors: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    waits: Counter[tuple[str, tuple[str, int]]] = field(default_factory=Counter)
    conflicts: Counter[tuple[str, int]] = field(default_factory=Counter)
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)
    fetched: Counter[tuple[str, int]] = field(default_factory=Counter)


@dataclass(eq=False)
class _Slot:
    """A warp in its scheduler. pending: of each scoreboard, results under way. copies: when committed groups arrive."""

    warp: Warp
    scheduler: int
    ready: float = 0
    pending: list[int] = field(default_factory=lambda: [0] * 6)
    copies: list[float] = field(default_factory=list)
    last_copy: float = 0
    meets: tuple[int, int] | None = None
    awaits: int | None = None  # address of a barrier

    @property
    def done(self) -> bool:
        return not self.warp.live


class Multiprocessor:
    """Runs one CTA of `cta.threads`."""

    def __init__(self, machine: Machine, cta: Cta, constants: Constants, streamed: list[tuple[int, int]]) -> None:
        self._machine, self._cta, self._c = machine, cta, constants
        self._memory = Hierarchy(constants, len(cta.shared.data), streamed)
        code = machine.function.code
        self._units = [unit(i, constants) for i in code]
        self._kinds = [kind(i) for i in code]
        self._queued = [is_queued(i) for i in code]
        self._waits = [tuple(n for n in range(6) if i.wait >> n & 1) for i in code]
        self._slots = [_Slot(Warp(n, cta), n % _SCHEDULERS) for n in range(cta.threads // 32)]
        self._schedulers = [[s for s in self._slots if s.scheduler == n] for n in range(_SCHEDULERS)]
        self._last: list[_Slot | None] = [None] * _SCHEDULERS
        self._busy: list[dict[str, float]] = [{} for _ in range(_SCHEDULERS)]
        self._queue = [0] * _SCHEDULERS
        self._lsu_free = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._time = 0.0
        self._idle: Counter[str] = Counter()
        self._issued = 0
        self.report = Report()

    def run(self) -> Report:
        """Until all warps have come to their end."""
        while not all(slot.done for slot in self._slots):
            while self._events and self._events[0][0] <= self._time:
                heapq.heappop(self._events)[2]()
            picked = False
            reasons = []
            for scheduler in range(_SCHEDULERS):
                slot, reason = self._pick(scheduler)
                if slot is None:
                    reasons.append(reason)
                else:
                    picked = True
                    self._issued += 1
                    self._issue(slot)
            before = self._time
            self._time = self._time + 1 if picked else self._next_time()
            for reason in reasons:
                self._idle[reason] += int(self._time - before)
            if reasons and not picked:
                for slot in self._slots:
                    if not slot.done:
                        code = self._machine.function.code[slot.warp.running.position]
                        self.report.waits[self._why(slot), code.source] += int(self._time - before)
        self.report.cycles = self._time
        self.report.sectors = self._memory.sectors
        total = self._time * _SCHEDULERS
        idle = {name: n / total for name, n in self._idle.most_common()}
        self.report.shares = {"issue": self._issued / total} | idle
        return self.report

    def _why(self, slot: _Slot) -> str:
        if slot.done:
            return "done"
        if slot.meets is not None or slot.awaits is not None:
            return "barrier"
        if slot.ready > self._time:
            return "stall"
        position = slot.warp.running.position
        if any(slot.pending[n] for n in self._waits[position]):
            return "scoreboard"
        i = self._machine.function.code[position]
        if i.name == "DEPBAR" and not self._copies_are_there(slot, i):
            return "scoreboard"
        taken = self._units[position]
        if taken is not None and self._busy[slot.scheduler].get(taken[0], 0) > self._time:
            return "pipe"
        if self._queued[position] and self._queue[slot.scheduler] >= _QUEUE:
            return "queue"
        return ""

    def _pick(self, scheduler: int) -> tuple[_Slot | None, str]:
        last, reason = self._last[scheduler], "done"
        candidates = self._schedulers[scheduler]
        if last is not None and not last.done:
            candidates = [last, *(slot for slot in candidates if slot is not last)]
        for slot in candidates:
            why = self._why(slot)
            if not why:
                self._last[scheduler] = slot
                return slot, ""
            reason = why if reason == "done" else reason
        return None, reason

    def _next_time(self) -> float:
        times = [self._events[0][0]] if self._events else []
        for slot in self._slots:
            if not slot.done and slot.meets is None and slot.awaits is None:
                times.append(slot.ready)
                times += slot.copies
        for busy in self._busy:
            times += busy.values()
        later = [when for when in times if when > self._time]
        if not later:
            where = {
                f"{self._why(slot)} at {self._machine.function.code[slot.warp.running.position].text}"
                for slot in self._slots
                if not slot.done
            }
            raise RuntimeError(f"the warps wait for what does not come: {'; '.join(sorted(where))}")
        return float(np.ceil(min(later)))

    def _copies_are_there(self, slot: _Slot, i: Instruction) -> bool:
        pending = int(i.operands[1], 0)
        waited = slot.copies[: len(slot.copies) - pending] if pending else slot.copies
        return all(when <= self._time for when in waited)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, action))

    def _hold(self, slot: _Slot, board: int, until: float) -> None:
        if board == 7:
            return
        slot.pending[board] += 1

        def release() -> None:
            slot.pending[board] -= 1

        self._at(until, release)

    def _issue(self, slot: _Slot) -> None:
        position = slot.warp.running.position
        i = self._machine.function.code[position]
        self._cta.clock = int(self._time)
        effect = self._machine.step(slot.warp)
        if effect is not None and effect.waits:
            slot.awaits = effect.barrier
            return
        self.report.instructions[self._kinds[position]] += not i.never_runs
        taken = self._units[position]
        if taken is not None:
            self._busy[slot.scheduler][taken[0]] = self._time + taken[1]
        slot.ready = self._time + max(i.stall, 1)
        self._hold(slot, i.write_barrier, self._completion(slot, i, effect))
        if not self._queued[position]:
            self._hold(slot, i.read_barrier, self._time + 4)
        if i.name == "LDGDEPBAR":
            slot.copies.append(slot.last_copy)
        if effect is None:
            return
        if effect.meets is not None:
            self._meet(slot, effect.meets)
        if effect.barrier is not None and not effect.bulk:
            self._wake()

    def _completion(self, slot: _Slot, i: Instruction, effect: Effect | None) -> float:
        """When the result of an instruction is there."""
        c, now = self._c, self._time
        if i.name == "SHFL" or (effect is not None and effect.addresses is not None and not effect.bulk):
            return self._through_queue(slot, i, effect)
        if effect is not None and effect.bulk:
            assert effect.addresses is not None
            self._at(self._memory.access(now, sectors(effect.addresses, 32), past_l1=True), self._landing(effect))
            return now + 4
        if i.name in ("LDC", "ULDC"):
            return now + c.constant_latency
        return now + (c.special_latency if i.name == "MUFU" else c.variable_latency)

    def _through_queue(self, slot: _Slot, i: Instruction, effect: Effect | None) -> float:
        c = self._c
        addresses = None if effect is None else effect.addresses
        if addresses is not None and len(addresses) == 0:
            self._hold(slot, i.read_barrier, self._time + 4)
            return self._time + 4
        width = 0 if effect is None else effect.width
        in_shared = i.name in ("LDS", "STS") or (addresses is not None and bool(is_shared(addresses).any()))
        if addresses is None:
            wavefronts = 1
        elif in_shared:
            wavefronts = shared_wavefronts(addresses, width)
            self.report.conflicts[i.source] += wavefronts - -(-len(addresses) * max(width, 4) // 128)
        else:
            lines = len(np.unique(addresses // np.uint64(128)))
            wavefronts = max(int(np.ceil(lines / c.l1_lines)), -(-len(addresses) * width // 128))
        start = max(self._lsu_free, self._time + 4)
        self._lsu_free = start + wavefronts
        self.report.wavefronts += wavefronts if in_shared or addresses is None else 0
        self._queue[slot.scheduler] += 1

        def leave() -> None:
            self._queue[slot.scheduler] -= 1

        self._at(self._lsu_free, leave)
        self._hold(slot, i.read_barrier, self._lsu_free + 2)
        if addresses is None:
            return self._lsu_free + c.shuffle_latency - 1
        if in_shared or i.name in ("LDL", "STL"):
            return self._lsu_free + c.shared_latency - 1
        if i.name in ("STG", "ST", "REDG", "RED"):
            return self._lsu_free
        touched = sectors(addresses, width)
        self.report.asked[i.source] += len(np.unique(addresses)) * width
        self.report.fetched[i.source] += len(touched) * SECTOR
        ready = self._memory.access(start, touched, past_l1=i.name == "LDGSTS")
        if i.name == "LDGSTS":
            slot.last_copy = max(slot.last_copy, ready)
            return self._lsu_free
        return ready

    def _landing(self, effect: Effect) -> Callable[[], None]:
        def land() -> None:
            assert effect.barrier is not None
            phases = self._cta.barriers[effect.barrier]
            phases.num_bytes -= effect.bulk
            phases.end_if_complete()
            self._wake()

        return land

    def _wake(self) -> None:
        """Those that wait for a barrier ask again."""
        for slot in self._slots:
            if slot.awaits is not None:
                slot.awaits = None
                slot.ready = max(slot.ready, self._time + self._c.barrier_latency)

    def _meet(self, slot: _Slot, meeting: tuple[int, int]) -> None:
        slot.meets = meeting
        waiting = [other for other in self._slots if other.meets is not None and other.meets[0] == meeting[0]]
        if len(waiting) * 32 < meeting[1]:
            return
        for other in waiting:
            other.meets = None
            other.ready = max(other.ready, self._time + self._c.barrier_latency)
