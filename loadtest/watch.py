"""A server seen from outside: its Prometheus metrics and the memory of its processes."""

import time
from collections.abc import Sequence
from contextlib import suppress

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

#: Metrics that are 0 on an idle server. The last one exists for antkv caches only.
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:antkv_pages_in_use")
_MEBIBYTE = 1 << 20
_TIMEOUT = 30.0


def metrics(url: str) -> dict[str, float]:
    """Values by sample name, summed over all labels."""
    text = httpx.get(f"{url}/metrics", timeout=_TIMEOUT).raise_for_status().text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def wait_until_idle(url: str, seconds: float) -> dict[str, float]:
    """Metrics of `BUSY` that are not 0 after at most `seconds`: empty when no request and no block is left."""
    deadline = time.monotonic() + seconds
    while True:
        now = metrics(url)
        held = {name: now[name] for name in BUSY if now.get(name)}
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(1)


def memory(pid: int) -> dict[str, float]:
    """Unique set size in MiB by process name, of a process and its descendants."""
    parent = psutil.Process(pid)
    used: dict[str, float] = {}
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            used[process.name()] = used.get(process.name(), 0.0) + process.memory_full_info().uss / _MEBIBYTE
    return used


def slope(seconds: Sequence[float], mebibytes: Sequence[float]) -> float:
    """MiB per minute, by least squares."""
    return float(np.polyfit(np.asarray(seconds) / 60, mebibytes, deg=1)[0])
