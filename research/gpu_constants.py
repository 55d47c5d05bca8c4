"""What the model of a multiprocessor (research/sm_model) takes for granted, measured on this GPU.

The interval of mma.sync and of half-precision arithmetic, latencies of L1, L2 and DRAM, lines of L1 a cycle, what L2
gives to random sectors and DRAM to bulk copies of pages when all multiprocessors ask.
`python -m research.sm_model --constants FILE` reads the JSON.

    python -m research.gpu_constants --json FILE     # about ten seconds
"""

import argparse
import ctypes
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.tables import table
from research.sm_model.constants import Constants

SOURCE = Path(__file__).with_name("constants.cu")
#: Bytes: that stay in L1, in L2 (half of an H100's), and that do not.
SIZES = 16 << 10, 16 << 20, 2 << 30
#: Of a page of one KV head at 1 bit: codes, anchors and their offsets, in steps of 16.
PAGE_BYTES = 4624
_RING = 6

#: Runs (kernel, blocks, threads, bytes of shared memory, arguments after `out` and `rounds`, rounds): numbers by block.
Launch = Callable[[str, int, int, int, tuple[Any, ...], int], torch.Tensor]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args()
    from benchmarks.gpu.device import require_gpu, write_report

    require_gpu()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    found = measure(_on_gpu(), "cuda", multiprocessors, SIZES, 2000)
    report = {"constants": found, "rows": rows(found)}
    write_report(arguments.json, report)
    print(constants_table(report))


def measure(launch: Launch, device: str, blocks: int, sizes: tuple[int, ...], rounds: int) -> dict[str, float]:
    """Values for fields of `Constants`.

    blocks: as many as there are multiprocessors. sizes: as `SIZES`.
    """
    found = {name: launch(name, 1, 256, 0, (), rounds).median().item() for name in ("mma_interval", "half_interval")}
    for name, num_bytes in zip(("l1_latency", "l2_latency", "dram_latency"), sizes, strict=False):
        chain = _chain(num_bytes, device)
        found[name] = launch("load_latency", 1, 32, 0, (chain,), rounds).item()
        del chain
    in_l1 = torch.zeros(sizes[0], dtype=torch.uint8, device=device)
    found["l1_lines"] = launch("l1_lines", 1, 256, 0, (in_l1, ctypes.c_uint32(sizes[0] // 128)), rounds // 8).item()
    in_l2 = torch.randint(0, 255, (sizes[1],), dtype=torch.uint8, device=device)
    warm = (in_l2, ctypes.c_uint32(sizes[1] // 32))
    for _ in range(2):
        found["l2_bytes"] = launch("sector_rate", blocks, 256, 0, warm, rounds // 8).median().item()
    pages = torch.randint(0, 255, (sizes[2],), dtype=torch.uint8, device=device)
    cold = (pages, ctypes.c_uint32(sizes[2] // PAGE_BYTES), ctypes.c_uint32(PAGE_BYTES))
    found["dram_bytes"] = launch("page_rate", blocks, 32, 64 + _RING * PAGE_BYTES, cold, rounds).median().item()
    return found


def _chain(num_bytes: int, device: str) -> torch.Tensor:
    """Every word, a sector or more from the last, says where the next is: int32."""
    step = 32
    places = torch.randperm(num_bytes // 4 // step)[: 1 << 20] * step
    chain = torch.zeros(num_bytes // 4, dtype=torch.int32)
    # The chain begins at word 0.
    places = torch.cat((torch.zeros(1, dtype=torch.int64), places[places > 0]))
    chain[places] = places.roll(-1).int()
    return chain.to(device)


def rows(found: dict[str, float]) -> list[dict[str, Any]]:
    """Beside what the model assumes."""
    return [{"name": name, "assumed": vars(Constants()).get(name), "measured": n} for name, n in found.items()]


def constants_table(report: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        [row["name"], "" if row["assumed"] is None else f"{row['assumed']:g}", f"{row['measured']:.2f}"]
        for row in report["rows"]
    ]
    return table(["constant (cycles, or bytes or lines a cycle)", "assumed", "measured"], lines)


def _on_gpu() -> Launch:
    """Compiled and launched through CuPy."""
    cupy = importlib.import_module("cupy")

    text = (SOURCE.parents[1] / "vllm_antkv" / "csrc" / "cuda" / "device.cuh").read_text()
    source = SOURCE.read_text().replace('#include "device.cuh"', text.replace("#pragma once", ""))
    module = cupy.RawModule(code=source, options=("--std=c++17",))

    def launch(name: str, blocks: int, threads: int, shared: int, more: tuple[Any, ...], rounds: int) -> torch.Tensor:
        kernel, out = module.get_function(name), torch.zeros(blocks, device="cuda")
        kernel.max_dynamic_shared_size_bytes = max(shared, 1)
        values = [cupy.uint32(value.value) if isinstance(value, ctypes.c_uint32) else value for value in more]
        pointers = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
        kernel((blocks,), (threads,), (out.data_ptr(), cupy.int32(rounds), *pointers), shared_mem=shared)
        torch.cuda.synchronize()
        return out

    return launch


if __name__ == "__main__":
    main()
