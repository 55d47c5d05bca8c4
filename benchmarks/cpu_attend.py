"""Times a layer's three operations alone: variants of the C++ kernels and vLLM's own on the same shape, in turns.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_attend --contexts 1024 4096 --batches 1 8
    OMP_NUM_THREADS=1 python -m benchmarks.cpu_attend --contexts 1024 4096 --batches 1 --new-tokens 1024
    OMP_NUM_THREADS=1 python -m benchmarks.cpu_attend --kernels avx512 avx512_bf16 --preset antkv-0.375bit --group 8
    python -m benchmarks.cpu_attend --preset antkv-0.75bit --contexts 4096 --read-mb 100

Pages hold random codes, anchors and rows, so that nothing needs to be computed before. Every layer has its own, and
is timed alone, the best of many calls: other work on the machine disturbs that least. Caches are warm, unless so much
other memory is read before every step, as a model reads its weights between two layers' attention: medians, then.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import mean, median

import torch
from vllm import _custom_ops as vllm_ops
from vllm.platforms import current_platform

from benchmarks.cpu_decode import processor
from vllm_antkv.cache.pages import PageLayout, RecencyPages, VQPages, pool_block_bytes
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops import cpu
from vllm_antkv.ops.counters import OPERATIONS, Counters
from vllm_antkv.ops.layer import LayerState, StepRows
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.rope import RotaryTable, interleaved, reordered
from vllm_antkv.ops.step import Step
from vllm_antkv.presets import PRESETS
from vllm_antkv.select.recency import last_query_table

HEAD_SIZE, NUM_KV_HEADS, ROPE_BASE = 128, 2, 500_000.0

#: Runs a step; gives the seconds of its operations by name.
Call = Callable[[], dict[str, float]]


def main() -> None:
    """Print a line for every setting."""
    arguments = _arguments()
    current_platform.import_kernels()
    variants = [variant for variant in cpu.VARIANTS if variant.name in arguments.kernels or not arguments.kernels]
    variants = [variant for variant in variants if variant.missing() is None]
    print(processor(), f"{torch.get_num_threads()} threads")
    for context in arguments.contexts:
        for batch in arguments.batches:
            # Around the context: the open block of a request is half full on average.
            lengths = [context + (37 * request + 64) % 128 - 64 for request in range(batch)]
            layers = [Layer(arguments, lengths, seed) for seed in range(arguments.layers)]
            sides: dict[str, list[Call]] = defaultdict(list)
            for layer in layers:
                for variant in variants:
                    sides[variant.name].append(layer.call(variant))
                sides["vLLM"].append(_vllm(arguments, lengths))
            print(
                f"{arguments.preset}, group {arguments.group}, {context} x {batch}, {arguments.new_tokens} new tokens "
                "each, us a layer:"
            )
            times = _after_reading(sides, arguments.read_mb) if arguments.read_mb else _best(sides)
            for name, seconds in times.items():
                parts = {operation: 1e6 * of_operation for operation, of_operation in seconds.items()}
                ns = sum(parts.values()) * 1e3 / (sum(lengths) * NUM_KV_HEADS)
                shown = ", ".join(f"{operation} {us:.1f}" for operation, us in parts.items())
                print(f"  {name}: {shown}; all {ns:.1f} ns per token and KV head", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kernels", nargs="+", default=[], help="Variants; all that run here where none is named.")
    parser.add_argument("--preset", default="antkv-1bit")
    parser.add_argument("--group", type=int, default=4, help="Query heads per KV head.")
    parser.add_argument("--new-tokens", type=int, default=1, help="Of every request: 1 decodes, more prefill.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--read-mb", type=int, default=0, help="Other memory read before every step.")
    return parser.parse_args()


def _best(sides: dict[str, list[Call]]) -> dict[str, dict[str, float]]:
    """Seconds of each operation: mean over layers of its best time, over 100 calls."""
    best: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for _ in range(100):
        for name, layers in sides.items():
            for index, call in enumerate(layers):
                for operation, seconds in call().items():
                    times = best[name].setdefault(operation, [float("inf")] * len(layers))
                    times[index] = min(times[index], seconds)
    return {name: {operation: mean(times) for operation, times in found.items()} for name, found in best.items()}


def _after_reading(sides: dict[str, list[Call]], num_mb: int) -> dict[str, dict[str, float]]:
    """Seconds of each operation of a step when so much other memory was read before: medians of 30."""
    other = torch.zeros(num_mb << 18)
    taken: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in sides}
    for number in range(30):
        for name, layers in sides.items():
            other.sum()
            for operation, seconds in layers[number % len(layers)]().items():
                taken[name][operation].append(seconds)
    return {name: {operation: median(times) for operation, times in taken[name].items()} for name in sides}


class Layer:
    """Pages of random content, and a step over the last tokens of every request."""

    def __init__(self, arguments: argparse.Namespace, lengths: list[int], seed: int) -> None:
        kind, config = PRESETS[arguments.preset], AntKVConfig()
        max_len, num_heads, new = max(lengths), arguments.group * NUM_KV_HEADS, arguments.new_tokens
        layout = PageLayout.of(config, kind, HEAD_SIZE, torch.bfloat16)
        random = torch.Generator().manual_seed(seed)
        last_query = last_query_table(config, max_len)
        num_vq = [-(-length // VQ_BLOCK_SIZE) for length in lengths]
        size = layout.recency_block_size
        exact = [sorted({p // size for p in range(n) if last_query[p] >= n - new}) for n in lengths]
        # Blocks of a pool in a random order, as after some churn; block 0 is nobody's.
        total = sum(num_vq) + sum(map(len, exact))
        order = (torch.randperm(total, generator=random) + 1).to(torch.int32)
        vq_table, recency_table = (
            torch.zeros(len(lengths), n, dtype=torch.int32) for n in (max(num_vq), max(lengths) // size + 1)
        )
        taken = 0
        for request, (blocks, pages) in enumerate(zip(num_vq, exact, strict=True)):
            vq_table[request, :blocks] = order[taken : taken + blocks]
            recency_table[request, pages] = order[taken + blocks : taken + blocks + len(pages)]
            taken += blocks + len(pages)
        raw = torch.zeros(total + 1, NUM_KV_HEADS, 1, pool_block_bytes([layout]), dtype=torch.uint8)
        vq = VQPages.view(raw[..., : layout.vq_page_bytes], layout)
        recency = RecencyPages.view(raw[..., : layout.recency_page_bytes], layout, torch.bfloat16)
        for ids, fill in ((vq_table, self._fill_vq), (recency_table, self._fill_recency)):
            fill(vq, recency, ids[ids > 0].long(), random)
        tables = (NUM_KV_HEADS, kind.num_sub_vectors(HEAD_SIZE), kind.num_centroids, kind.sub_vector_size)
        k_centroids, v_centroids = (torch.randn(tables, generator=random).half().float() for _ in "kv")
        angles = torch.arange(max_len)[:, None] * ROPE_BASE ** (-torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2))
        rotary = RotaryTable(angles.cos(), angles.sin())
        k_order = interleaved(rotary, HEAD_SIZE, kind.sub_vector_size)
        self._state = LayerState(
            vq=vq,
            recency=recency,
            k_centroids=k_centroids,
            v_centroids=v_centroids,
            preset=kind,
            k_order=torch.tensor(k_order, dtype=torch.int32),
            rotary=reordered(rotary, k_order),
            jensen_weights=torch.zeros(num_heads, HEAD_SIZE),
            last_query=last_query,
            config=config,
            num_heads=num_heads,
            rules=LogitRules(HEAD_SIZE**-0.5),
            counters=Counters(torch.device("cpu"), "benchmark"),
            counts_rows=False,
            max_num_reqs=len(lengths),
            scratch=lambda *_: [],
        )
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * new
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self._step = Step(starts, seq_lens, vq_table, recency_table, new, max(lengths))
        self._rows = [
            torch.randn(len(lengths) * new, heads, HEAD_SIZE, generator=random).bfloat16()
            for heads in (num_heads, NUM_KV_HEADS, NUM_KV_HEADS, num_heads)
        ]

    @staticmethod
    def _fill_vq(vq: VQPages, recency: RecencyPages, ids: torch.Tensor, random: torch.Generator) -> None:
        for codes in (vq.k_codes, vq.v_codes):
            codes[ids] = torch.randint(0, 256, codes[ids].shape, generator=random, dtype=torch.uint8)
        for anchors in (vq.k_anchors, vq.v_anchors):
            rows = 0.3 * torch.randn(anchors[ids].shape, generator=random)
            anchors[ids] = rows.to(torch.float8_e4m3fn).view(torch.uint8)
        offsets = torch.rand(*vq.anchor_offsets[ids].shape[:-1], VQ_BLOCK_SIZE, generator=random).argsort(-1)
        vq.anchor_offsets[ids] = offsets[..., : vq.anchor_offsets.shape[-1]].to(torch.int16)

    @staticmethod
    def _fill_recency(vq: VQPages, recency: RecencyPages, ids: torch.Tensor, random: torch.Generator) -> None:
        for rows in (recency.k, recency.v):
            rows[ids] = torch.randn(rows[ids].shape, generator=random).bfloat16()

    def call(self, variant: cpu.Variant) -> Call:
        """A step, timed by the kernels themselves."""
        operations, timings = cpu.CpuOperations(self._state, variant), self._state.counters.timings
        query, key, value, output = self._rows

        def run() -> dict[str, float]:
            before = [timing.seconds for timing in timings]
            operations.run(StepRows(query, key, value, None), output, self._step)
            return {
                name: timing.seconds - start for name, timing, start in zip(OPERATIONS, timings, before, strict=True)
            }

        return run


def _vllm(arguments: argparse.Namespace, lengths: list[int]) -> Call:
    """Kernels of vLLM, on a layer of random bfloat16 rows."""
    group, new = arguments.group, arguments.new_tokens
    num_heads, block_size = group * NUM_KV_HEADS, 128
    blocks = -(-max(lengths) // block_size)
    isa = "amx" if torch.cpu.get_capabilities().get("amx_bf16") else "vec"
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * new
    metadata = vllm_ops.cpu_attn_get_scheduler_metadata(
        len(lengths), num_heads, NUM_KV_HEADS, HEAD_SIZE, seq_lens, torch.bfloat16, starts, True, -1, isa, True
    )
    cache = torch.zeros(len(lengths) * blocks + 1, NUM_KV_HEADS, block_size * 2, HEAD_SIZE, dtype=torch.bfloat16)
    key_cache, value_cache = cache.chunk(2, dim=2)
    table = (torch.randperm(len(lengths) * blocks) + 1).reshape(len(lengths), blocks).to(torch.int32)
    slots = (torch.arange(block_size) + block_size * table[..., None]).reshape(-1).long()
    rows = torch.randn(2, len(slots), NUM_KV_HEADS, HEAD_SIZE).bfloat16()
    vllm_ops.cpu_attn_reshape_and_cache(rows[0], rows[1], key_cache, value_cache, slots, isa)
    query = torch.randn(len(lengths) * new, num_heads, HEAD_SIZE).bfloat16()
    attention = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "output": torch.empty_like(query),
        "query_start_loc": starts,
        "seq_lens": seq_lens,
        "scale": HEAD_SIZE**-0.5,
        "causal": True,
        "alibi_slopes": None,
        "sliding_window": -1,
        "block_table": table,
        "softcap": 0.0,
        "scheduler_metadata": metadata,
        "s_aux": None,
    }
    last = torch.cat([slots.view(len(lengths), -1)[i, n - new : n] for i, n in enumerate(lengths)])
    stored = rows[0, : len(last)], rows[1, : len(last)], key_cache, value_cache, last, isa

    def run() -> dict[str, float]:
        start = time.perf_counter()
        vllm_ops.cpu_attn_reshape_and_cache(*stored)
        between = time.perf_counter()
        vllm_ops.cpu_attention_with_kv_cache(**attention)
        return {"store": between - start, "attend": time.perf_counter() - between}

    return run


if __name__ == "__main__":
    main()
