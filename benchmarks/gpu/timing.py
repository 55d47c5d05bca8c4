"""Times of GPU kernels, and the memory bandwidth to hold them against."""

import contextlib
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch


def measure(run: Callable[[], object], graph: bool) -> dict[str, float]:
    """Median and distance between the quartiles, in milliseconds, of many runs, each with an empty L2 cache.

    Args:
        graph: capture `run` in a CUDA graph and time replays, as vLLM decodes: launches then cost nothing.
    """
    from triton.testing import do_bench

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    first, median, third = statistics.quantiles(do_bench(run, warmup=25, rep=100, return_mode="all"))
    return {"median_ms": median, "spread_ms": third - first}


def attempt(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measured` returns, or its error: the other sides are still worth measuring. Its memory is free again."""
    try:
        return measured()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        # After an invalid access in a kernel, every call of CUDA's fails in this process.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def failed(sides: dict[str, dict[str, Any]]) -> bool:
    """Some side could not run."""
    return any("error" in side for side in sides.values())


def memory_bandwidth() -> float:
    """Bytes per second that copying 2 GiB on the device reads and writes."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (measure(lambda: target.copy_(source), graph=False)["median_ms"] / 1e3)
