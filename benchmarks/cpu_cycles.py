"""Predicts the cycles of an operation of the C++ kernels, from the machine code that runs, on a processor not at hand.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_cycles --kernels amx --contexts 1024 4096
    OMP_NUM_THREADS=1 python -m benchmarks.cpu_cycles --kernels avx512_bf16 --processor znver4

A child is run through the operation by single steps, and what it executes goes to llvm-mca, LLVM's model of a core
(version 19; on Debian the package llvm-19): ports, latencies, the window of instructions that wait. There, memory
answers from the first-level cache and branches are foreseen, so that a core takes longer: docs/performance.md says how
much. Of tile instructions the loads count; products have a unit of their own, whose cycles are printed beside. Nothing
executes tile instructions: what they store becomes random numbers from 0 to 64, of which one is the least of many by
more than rounding, as of distances to centroids, and none is so large that sums are scaled anew. One request, one KV
head, one thread.
"""

import argparse
import ctypes
import os
import random
import re
import signal
import subprocess
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, ClassVar, cast

from benchmarks import cpu_attend
from vllm_antkv.ops import cpu

_OPERATIONS = ("encode_store", "anchor_score", "attend")
_TILES = re.compile(r"tile|tdp|ldtilecfg|sttilecfg")
#: Cycles of the unit for products of tiles for one of 16 rows: assumed.
_CYCLES_OF_PRODUCT = 16
#: What llvm-mca 19 has wrong, by processor: instructions, and what has the ports and the latency that they have. On
#: Sapphire Rapids two units take products of 64 bytes where LLVM knows one (as OSACA's measured model has it),
#: and vectors of 32 bytes have no third port beside those of 64. On Zen 4 products with sums start every cycle, and two
#: loads where LLVM has one (both measured).
_INSTEAD = {
    "sapphirerapids": (
        (r"(vfn?m(?:add|sub)\w+ps|vpdpwssd|vpdpbusd)\t(.*%zmm\d+)$", r"vaddps\t\2 {%k7}"),
        (r"(vmulps|vmaxps|vminps|vpmulhrsw|vpmaddwd|vpmaddubsw)\t(.*%zmm\d+)$", r"vaddps\t\2 {%k7} {z}"),
        (r"vinserti(?:128|64x2|32x4)\t\$\d+, (.*\)), %ymm(\d+), %ymm(\d+)$", r"vpaddd\t\1, %zmm\2, %zmm\3"),
    ),
    "znver4": (
        (r"(vdpbf16ps|vpdpwssd|vpdpbusd)\t(.*%zmm\d+)$", r"vfmadd231ps\t\2"),
        (r"vinserti(?:128|64x2|32x4)\t\$\d+, (.*\), %ymm.*)", r"vpunpcklqdq\t\1"),
        (r"vpbroadcastd\t(.*\).*)", r"vmovups\t\1"),
    ),
}
# Requests of ptrace(2).
_TRACE_ME, _CONTINUE, _STEP, _GET_REGISTERS, _SET_REGISTERS = 0, 7, 9, 12, 13


class _Registers(ctypes.Structure):
    """user_regs_struct of Linux on x86-64."""

    _fields_: ClassVar = [
        *((f"r{number}", ctypes.c_uint64) for number in (15, 14, 13, 12)),
        *(
            (name, ctypes.c_uint64)
            for name in ("rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi")
        ),
        *((name, ctypes.c_uint64) for name in ("orig_rax", "rip", "cs", "eflags", "rsp", "ss")),
        *((name, ctypes.c_uint64) for name in ("fs_base", "gs_base", "ds", "es", "fs", "gs")),
    ]


def main() -> None:
    """Print a line for every context."""
    arguments = _arguments()
    variant = next(variant for variant in cpu.VARIANTS if variant.name == arguments.kernels)
    listing = Listing(variant.path, arguments.llvm)
    cpu_attend.NUM_KV_HEADS = 1
    shape = f"{arguments.preset}, group {arguments.group}"
    print(f"{arguments.operation} of {variant.name} on {arguments.processor}, {shape}:")
    for context in arguments.contexts:
        operations = cpu_attend.Layer(arguments, [context], 0).calls(variant)
        call, function = operations[arguments.operation], getattr(cpu._library(variant), f"antkv_{arguments.operation}")
        executed = listing.executed(ctypes.cast(function, ctypes.c_void_p).value or 0, call)
        tokens = context if arguments.new_tokens == 1 else arguments.new_tokens
        cycles = simulated(executed, arguments.processor, arguments.llvm) / tokens
        products = sum(text.startswith("tdp") for text in executed) * _CYCLES_OF_PRODUCT / tokens
        line = (
            f"  {context} tokens: {len(executed) / tokens:.0f} instructions, {cycles:.1f} cycles per token and KV head"
        )
        if products:
            line += f", beside at most {products:.1f} of products of tiles"
        if variant.missing() is None:
            line += f"; here {_best_seconds(call) * 1e9 / tokens:.1f} ns"
        print(line, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="amx", choices=[variant.name for variant in cpu.VARIANTS])
    parser.add_argument("--processor", default="sapphirerapids", choices=_INSTEAD)
    parser.add_argument("--operation", default="attend", choices=_OPERATIONS)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--preset", default="antkv-1bit")
    parser.add_argument("--group", type=int, default=4, help="Query heads per KV head.")
    parser.add_argument("--new-tokens", type=int, default=1, help="Of the request: 1 decodes, more prefill.")
    parser.add_argument("--llvm", default="-19", help="What the names of LLVM's tools end in.")
    return parser.parse_args()


def _best_seconds(call: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(100):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def simulated(executed: list[str], processor: str, llvm: str) -> int:
    """Cycles of instructions, one after the other, on a processor."""
    lines = []
    for text in executed:
        if _TILES.match(text):
            # A row of a tile is a load of 64 bytes.
            if address := re.match(r"tileloadd\s+(.*\))", text):
                lines += [f"prefetcht0\t{address[1]}"] * 16
            continue
        for pattern, other in _INSTEAD[processor]:
            text = re.sub(pattern, other, text)
        lines.append(text)
    command = [
        f"llvm-mca{llvm}",
        f"-mcpu={processor}",
        "-iterations=1",
        "-instruction-info=false",
        "-resource-pressure=false",
    ]
    said = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"Total Cycles:\s+(\d+)", said)[0])


class Listing:
    """The instructions of a library of kernels, by their addresses in it."""

    def __init__(self, path: Path, llvm: str) -> None:
        self._path = path.resolve()
        command = [f"llvm-objdump{llvm}", "-d", "--no-show-raw-insn", "--mattr=+amx-tile,+amx-bf16", str(self._path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = re.findall(r"^ *([0-9a-f]+):\s+(\S[^#<\n]*)", said, re.MULTILINE)
        self._texts = {int(address, 16): text.strip() for address, text in lines}
        self._next = dict(zip(self._texts, list(self._texts)[1:], strict=False))

    def executed(self, entry: int, call: Callable[[], None]) -> list[str]:
        """What a call executes of this library in the function at `entry`, in order, without what that calls elsewhere.

        Raises:
            RuntimeError: the call ends before the function returns.
        """
        with open("/proc/self/maps") as maps:
            base = next(int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(str(self._path)))
        child = _Child(call)
        child.run_to(entry)
        top, texts, last = child.registers().rsp, [], 0
        while True:
            registers = child.registers()
            at = registers.rip - base
            text = self._texts.get(at)
            # A string instruction stops at every turn.
            if text and not (at == last and text.startswith("rep")):
                texts.append(text)
            last = at
            if text and _TILES.match(text):
                child.skip(text, registers, base + self._next[at])
                continue
            if text and text.startswith("ret") and registers.rsp >= top:
                child.end()
                return texts
            child.step()


class _Child:
    """A copy of this process that calls something and is run by steps."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._random = random.Random(0)
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._pid = os.fork()
        if self._pid == 0:
            self._ptrace(_TRACE_ME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            call()
            os._exit(0)
        os.waitpid(self._pid, 0)

    def run_to(self, address: int) -> None:
        """Runs until the instruction at an address is the next one."""
        with self._memory() as memory:
            memory.seek(address)
            first = memory.read(1)
            self._write(memory, address, b"\xcc")
            self._go(_CONTINUE)
            self._write(memory, address, first)
        registers = self.registers()
        registers.rip = address
        self._ptrace(_SET_REGISTERS, self._pid, None, ctypes.byref(registers))

    def step(self) -> None:
        """Executes an instruction."""
        self._go(_STEP)

    def skip(self, text: str, registers: _Registers, following: int) -> None:
        """Goes on at `following`, as if the tile instruction had stored random numbers, of a configuration zeros."""
        if text.startswith(("tilestored", "sttilecfg")):
            offset, base, index, scale = re.findall(r"(-?\w*)\(%(\w+)(?:,%(\w+))?(?:,(\d))?\)", text.replace(" ", ""))[
                0
            ]
            stride = getattr(registers, index) * int(scale or 1) if index else 0
            first = getattr(registers, base) + int(offset or "0", 0)
            with self._memory() as memory:
                for row in range(16 if index else 1):
                    row_bytes = min(stride, 64) or 64
                    numbers = array("f", (self._random.uniform(0, 64) for _ in range(row_bytes // 4 if index else 0)))
                    self._write(memory, first + row * stride, numbers.tobytes() or bytes(row_bytes))
        registers.rip = following
        self._ptrace(_SET_REGISTERS, self._pid, None, ctypes.byref(registers))

    def registers(self) -> _Registers:
        """What is in its registers."""
        registers = _Registers()
        self._ptrace(_GET_REGISTERS, self._pid, None, ctypes.byref(registers))
        return registers

    def end(self) -> None:
        """Ends it where it is."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _go(self, request: int) -> None:
        while True:
            self._ptrace(request, self._pid, None, None)
            _, status = os.waitpid(self._pid, 0)
            if not os.WIFSTOPPED(status):
                raise RuntimeError("the call ended, or was ended, before the function returned")
            if os.WSTOPSIG(status) == signal.SIGTRAP:
                return

    def _memory(self) -> BinaryIO:
        return cast(BinaryIO, open(f"/proc/{self._pid}/mem", "r+b", buffering=0))

    @staticmethod
    def _write(memory: BinaryIO, address: int, content: bytes) -> None:
        memory.seek(address)
        memory.write(content)


if __name__ == "__main__":
    main()
